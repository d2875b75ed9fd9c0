"""Slopes of ALiBi (Press et al., "Train short, test long", 2021)."""

from __future__ import annotations


def alibi_slopes(heads: int, steepest: float = 8.0) -> tuple[float, ...]:
    """One slope per head: 2^(-steepest k / n) with k = 1 … n, where n is the number of heads.

    Where that is no power of two, n is the next one: the even k come first, which are the slopes of half as many heads,
    then as many odd k as are needed (the authors' code, and that of BLOOM, Falcon and MPT).
    """
    n = 1 << (heads - 1).bit_length()
    steps = [*range(1, n + 1)] if n == heads else [*range(2, n + 1, 2), *range(1, n, 2)]
    return tuple(2.0 ** (-steepest * k / n) for k in steps[:heads])
