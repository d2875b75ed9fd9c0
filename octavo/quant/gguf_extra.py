"""Formats of GGUF files that devices do not multiply with as they are: each is rewritten, without loss, in a format of
ours that is wider.

The layouts are those of ggml (https://github.com/ggml-org/ggml, ggml-common.h). Every value is a float32 scale times an
integer; the product is exact. Rewriting keeps finite values, but for the sign of zeros.
"""

from __future__ import annotations

import base64
import dataclasses
import functools
import zlib
from collections.abc import Callable

import numpy as np
import numpy.typing as npt

from octavo.quant.affine import INT4_32, INT4_128, Affine
from octavo.quant.codebook import E2M1_16, IQ1_CODES, IQ2_CODES, IQ3_CODES, Codebook
from octavo.quant.gguf import half
from octavo.quant.mxfp4 import TWICE

U8 = npt.NDArray[np.uint8]
I8 = npt.NDArray[np.int8]
I32 = npt.NDArray[np.int32]
F32 = npt.NDArray[np.float32]


@dataclasses.dataclass(frozen=True)
class Rewritten:
    """A format of `block` elements in `bytes` bytes. `parts` takes blocks apart: scales [n, g] and integers
    [n, block]; a value is the product of the two, each scale being that of block / g elements."""

    name: str
    block: int
    bytes: int
    parts: Callable[[U8], tuple[F32, I8]]
    target: Affine | Codebook
    """The format it is rewritten in."""
    step: int = 1
    lowest: int = 0
    """Integers are step * (those of an affine target) + lowest, and step * (values of the table) of a codebook."""

    def dense(self, blocks: U8) -> F32:
        """uint8 [n, bytes] -> float32 [n, block]. Infinite or NaN scales give what IEEE arithmetic says."""
        with np.errstate(invalid="ignore", over="ignore"):
            scales, q = self.parts(blocks)
            shaped = q.reshape(len(blocks), scales.shape[1], -1).astype(np.float32)
            return (scales[:, :, None] * shaped).reshape(len(blocks), self.block)

    def rewrite(self, rows: U8) -> U8:
        """Rows uint8 [n_out, bytes per row] of this format as rows of `target`."""
        with np.errstate(invalid="ignore", over="ignore"):
            scales, q = self.parts(rows.reshape(-1, self.bytes))
            scales, q = scales.reshape(len(rows), -1), q.reshape(len(rows), -1)
            if isinstance(self.target, Affine):
                d, m = scales * np.float32(self.step), scales * np.float32(self.lowest)
                return self.target.rows((q - np.int8(self.lowest)) // np.int8(self.step), d, m)
            codes = np.zeros(256, np.uint8)
            codes[(self.target.table * self.step).astype(np.int8).view(np.uint8)] = np.arange(16, dtype=np.uint8)
            return self.target.rows(codes[q.view(np.uint8)], scales * np.float32(self.step))


# Runs of 8 (IQ1, IQ2) or 4 (IQ3) magnitudes that ggml's index tables name: entries are numbers in base 3 or 8, least
# digit first, in ascending order; here are their differences. Tables follow one another as _SIZES has them.
_SIZES = {"iq1": (2048, 8, 3), "iq2_xxs": (256, 8, 3), "iq2_xs": (512, 8, 3), "iq2_s": (1024, 8, 3)}
_SIZES |= {"iq3_xxs": (256, 4, 8), "iq3_s": (512, 4, 8)}
_MAGNITUDES = {"iq1": (-1, 0, 1), "iq3_xxs": (4, 12, 20, 28, 36, 44, 52, 62), "iq3_s": (1, 3, 5, 7, 9, 11, 13, 15)}
_STEPS = (
    "c-o~|&2A(~5zflY$}U$|cbD7kp0>y9@p@;Cu|{SvgIS?L8lho@R_uaS2(38Hi30~7fg@+cv+yiD4_`z^{#8}?ctEADuF8yzjGr$eBeRs!@iMB$-Q"
    "rg($1P3P5}vH8q*vpKC~fQst+NB;X@tYwQ(KwY#J9PObbMK!ZzXTUyF#C*(9&B;yDqLH;i+Tq64V|3UDUVY89isqGmmApd$pjanyt~`Zlt9X?ryK"
    "{Ml9{G)Z4O@fv3(aOWZr5Hc|d?c`7Hi2$%0^*iJN}j~=NrUs<tru(_AAk~uBUmuy>!ggQ!R3hVnZfnw|v-&SWbRs+haXeoW0{Gar*#b_gZjc~5mk"
    "{(?R`^H9X^@N-r2`!KkdJV9gv`+F^=41*vjzBxZ|7_r$fH4dDw!lO{K#q#3Uhm%-&+7_X27fxi+c1jl-o8dOZVIpZ7C)n5)VUZR35%Y#js8!UpQ)"
    "BnPOw}H7TY~>)MhadFlj{V(BiTgYC-96RMNQK8_QkP)L%Vo>N80~MM9V!SX|4zC5Akv=UF7R;(H5R)Od54+2GlYVxi;|xH++HiBUUv4|q(duOvqg"
    "F<ZwNF?(h;SxkoP94wRc@>yY)tp|DRgeSxDRD}*Ui`P6iq}&-|D|n`laqmYj*^YT0vRMYq^>wmBxFXM&`K7d#p6JabO>?@DKWvmgtV`vHqZoe`<D"
    "rT?yx+_SVO8PTYG5^2P<y`*EnDr)vP0dfiA#^PH=`ai;;9GOcgWjBF4J?S?2_6HqcF78MPypRp&t0uKj(dRGM?NdCdOVjawQta8EVGpu@P~(hAFO"
    "Qg{8VI^ST0k9wCcth4N_g7Ih*+72Evk99H5^s;7#xoVWHua^5Pg=z5U-^k|iBgl-t8wy2w^ni}RHo#{D~c9YHQ{Z~r{FISx$K~^}G>$~CKO1zd<1"
    ";5HPvI>^#qluo#<JCktLS;o>SPU{s#r~aT7A{wsI;$G?)rUH(E^{qw=`rzX%waAzANMSz%ACcO*h+2dvTT(5JFNjzH5vJQSyaN_Y9U?>YctETTwX"
    "((Sf8XCKDR^Awi(o|p@wKbV!_3pmE1?6%U0+{_9MgfXpDIqYuqZ<8)=;>{pKWIldZJ0%?p$^9BF0T_<JJ}TMbr<s)!sDYpJK@Bc0Xz<67HE)~vJ4"
    "6mqf?zt|WdAtSZ1Qngt&uDEKkQSWi?7+N^5K1{KO`#SIlS5xd>x|oR<2V!Yzhn7~)inBw$n)<rZNX+=1sr_iBcr3nmS#@h--oF@Np{xkpXziyuCV"
    "0c}h_sRz$=fz&I6cZV^8>m!Ql&e7vT;Nmtyppy+g1%wQ{q49=491!oM|rcM)_y0UaIp9H{Oq}(1-V>+OQlu9&w3Z;M+z1TlDVKSD^Y@_%)#GWIm!"
    "?^X}m_eh)IT1K&G!rLIBoo=2_Wn{)KMSNG}_w`^g1lKTPo*ZBW~&@I(1XgBHuX6?}PclD;w*xR!eYT`@pJKT3H$0f_~65O|Vd#k<|N{gB9c;r`*Y"
    "#rC5m$>gB+dcFn8FuO$bpuMOX0I^*t@@6~@4)#MV=pnnsy~79Uj0M;hq-Sc#RXgbo%(I`1^Iw%utonGJik{zfVa2*Jz8(oFCo(gGyS0c4XgZ%X)i"
    "(ZK{eIuf&a((xqNp;%zAW<ud;dxHeDC3ZPcJ)d>oodXTBKoAgo;QlV8Iw7-?lDbRvnzk&b9_Y&8eF*pV)Fq)8e%mSW8j5zY<P?3W>xuhN`IyH<~Q"
    "+cGZw`3xa?3#xk{_-<s=gvRjXFy;zluA#A?h4xF2;NPOX!`oZYy=8nXfrX9{f5Y^L>^`*Jw9Z!I%Zcuf6Zr79>0?%S#U9%-J_8pzrMgD@Ms)ga4}"
    "vZtYBVDD63EtBzG&II4i<I5{T1eDcxK{#!Ls~~vEe0Z*xp+Gg)>@@`|ntmSBR81;QS7wXyiTwY%{y9Ig)S0>wQs`P>lAN=@R;GKy$%5Zdo3Z@B`*"
    ">oK<YhPCewLc>f0X4cgDy3hyvlL%u&lyBqlSif8k7ZovH>G}mH#8covNs(&&MkH6Q<=aKV@29N#|<A016JF%Y_$8U}a7jwi^bm^>~wekG&kR1E6&"
    "v3@6Gt-Ynd^?b6i2t#U`>bKP#xApCQ*dk~vK#T}bv#MdgIsvXKlY&3Ps{9mcBY(iK)+Y#PqXA93ZD&zE$1V@HKUQc30^+R!g{~YSLtM{k<5}X+GJ"
    "P_(u5O4%WJwnKir47!<rGI!dlRCPEK|{7fU<j>@8-zU^Hx==+QhD+@w@f@p9NRWmPz~{HNp0{oiZuwy0RA#&>(iF4@<99sZPzSH{WzhUuQ`l&6lK"
    "YD*Q*<3vBLCaKEkQB7<nvPbU8{dVfP0w;T24Kh|P3B^UvE7z|D!MB*R1CIZQ6{{J<haKeqCd0lxXm2MpVP~bKjwmhJJlT%E`V5s*9)UN^We1GC;k"
    "7>0jy8*&ecn!78eX%h^<iN9F%Iuo@+*wIj^3qx39adWWxh81enk>eExG0T!RMq)u~VoduGx1zYMeK?KX3(d5qE_z@uuW^gO)w$3_J6)xJ%T$UpD+"
    "dk0+OP{K{oHzb;whig%e`s1tClncDmL1T+6kJre|;GDZS#EoVb?YPsVUYWqp-pRsOKLmgr7+JnwwhFh+<PB6o_jLO8x@)wpDvSargp0j2Rzj-Mae"
    "9Ew4-Kg^a99(u>BRyBYVQHShN<qg{(AH53+DAX<*%s*O)e4gQ3ilJ)Up&X`YxLaWw*mE1cKF}ojZR^yHav!(UZ^k8OEaIM&oK7~%=?V}+vER*MBI"
    "<nXQFq5*55;7qU?FZXP~$QC)!_r4Q^kmpJL{v)WsD?FV)+3kgEn#7ChhQXnn!E@%Qk5ev+TQgM^bu6Te9L^F~vAH}R(r;Us>+=V~sVxEkp-+36rz"
    "-^j_g5epm1L<{lYTuy-fcO(b9wQNN#{Hb@v81r^J#@kHJ);-OFE8rxjj_1@f8KdP}TsU{}-?R*$b83zniV_oT;rQDv{el&|d=-zR6Qj9UX(3TVJW"
    "n&8EA=DRZV?egbcBs#`3jq))KRJ`eor=nTqDm;Z0qkd$By6H7@;l4rx9z?cc(Bb#VmcRJmNEM>O147n&XVVV=g#iYF<Yy$L>N-md@k%Z6i+sCv9A"
    ">XJUz7b~UZ!yAJcr*kW4F6@89aG9qe5(J^~?!Mx`zL5sH&TvuXU$}%>7QTM0xy`1%V?P}@W$XS==-WA)alds3#OJ8stQ2se%^t6bMGsv)kH3?y4r"
    "8B94m)SS*I%dKn$VHZHdDaDDwC0mY${L*@hfc-lyr_c~TK$4GS>iun_LRSM&JfRA-q+8WSHrTd)Xzb?!p}gG4QQVuCup?#Z09+2oHZy*uei1dF-P"
    "`1V`MD(Y=I=-As^5#`xy}VUtPO|JO"
)


@functools.cache
def _grid(name: str) -> I8:
    """[entries, 8 or 4]."""
    steps = np.frombuffer(zlib.decompress(base64.b85decode(_STEPS)), "<u2")
    before = sum(size for other, (size, _, _) in _SIZES.items() if list(_SIZES).index(other) < list(_SIZES).index(name))
    entries, width, base = _SIZES[name]
    numbers = np.cumsum(steps[before : before + entries].astype(np.int64))
    digits = numbers[:, None] // base ** np.arange(width) % base
    values: I8 = np.array(_MAGNITUDES.get(name, (8, 25, 43)), np.int8)[digits]
    return values


@functools.cache
def _signs() -> I8:
    """[256, 8]: -1 where the bit is set."""
    bits = np.unpackbits(np.arange(256, dtype=np.uint8)[:, None], axis=1, bitorder="little")
    return (1 - 2 * bits.astype(np.int8)).astype(np.int8)


@functools.cache
def _even_signs() -> I8:
    """[128, 8]: of 7 bits and an eighth that makes their number even."""
    seven: I8 = _signs()[:128].copy()
    seven[:, 7] = seven[:, :7].prod(axis=1)
    return seven


def _words(b: U8, start: int, end: int, dtype: str) -> I32:
    """Little-endian integers of bytes [start, end) of each block."""
    return np.ascontiguousarray(b[:, start:end]).view(dtype).astype(np.int64).astype(np.int32)


def _odd(d: F32, scales: npt.NDArray[np.integer], part: float) -> F32:
    """d (2 s + 1) part: exact."""
    values: F32 = d * ((2 * scales + 1).astype(np.float32) * np.float32(part))
    return values


def _half_bytes(packed: U8) -> U8:
    """[n, k] -> [n, 2k]: of each byte the low half, then the high half."""
    return np.stack([packed & 15, packed >> 4], axis=2).reshape(len(packed), -1)


def _iq1_s(b: U8) -> tuple[F32, I8]:
    """float16 d · 32 low bytes of indices · 8 words, each for 32 elements: 4 x 3 high bits, 3 bits of scale, a sign of
    the shift by 1/8. In eighths."""
    high = _words(b, 34, 50, "<u2")
    index = b[:, 2:34] | (high[:, :, None] >> np.array([0, 3, 6, 9]) & 7).reshape(-1, 32) << 8
    shift = np.where(high & 0x8000, -1, 1).astype(np.int8)
    q = _grid("iq1")[index].reshape(-1, 8, 32) * np.int8(8) + shift[:, :, None]
    return _odd(half(b, 0), high >> 12 & 7, 1 / 8), q.reshape(-1, 256)


def _iq1_m(b: U8) -> tuple[F32, I8]:
    """32 low bytes of indices · 32 halves: 3 high bits, a sign of the shift by 1/8 · 4 words: 4 x 3 bits of scale of 16
    elements, a quarter of float16 d. In eighths."""
    words = _words(b, 48, 56, "<u2")
    d = (words >> 12 << np.array([0, 4, 8, 12])).sum(axis=1).astype(np.uint16).view(np.float16).astype(np.float32)
    scales = (words[:, :, None] >> np.array([0, 3, 6, 9]) & 7).reshape(-1, 16)
    high = _half_bytes(b[:, 32:48]).astype(np.int32)
    shift = np.where(high & 8, -1, 1).astype(np.int8)
    q = _grid("iq1")[b[:, :32] | (high & 7) << 8] * np.int8(8) + shift[:, :, None]
    return _odd(d[:, None], scales, 1 / 8), q.reshape(-1, 256)


def _iq2_xxs(b: U8) -> tuple[F32, I8]:
    """float16 d · of each 32 elements 4 indices and a word: 4 x 7 bits of signs, 4 bits of scale."""
    q, scales = _with_word(_grid("iq2_xxs")[b[:, 2:].reshape(-1, 8, 8)[:, :, :4]], _words(b, 2, 66, "<u4")[:, 1::2])
    return _odd(half(b, 0), scales, 1 / 8), q


def _iq3_xxs(b: U8) -> tuple[F32, I8]:
    """float16 d · 64 indices · of each 32 elements a word as in IQ2_XXS."""
    q, scales = _with_word(_grid("iq3_xxs")[b[:, 2:66]], _words(b, 66, 98, "<u4"))
    return _odd(half(b, 0), scales, 1 / 4), q


def _with_word(magnitudes: I8, words: I32) -> tuple[I8, I32]:
    """Integers [n, 256] from their magnitudes and the words' signs, and the words' scales [n, 8]."""
    signs = _even_signs()[words[:, :, None] >> np.array([0, 7, 14, 21]) & 127]
    return (magnitudes.reshape(signs.shape) * signs).reshape(-1, 256), words >> 28 & 15


def _iq2_xs(b: U8) -> tuple[F32, I8]:
    """float16 d · 32 words: 9 bits of index, 7 of signs · 16 halves: scales of 16 elements."""
    words = _words(b, 2, 66, "<u2")
    q = _grid("iq2_xs")[words & 511] * _even_signs()[words >> 9]
    return _odd(half(b, 0), _half_bytes(b[:, 66:74]), 1 / 8), q.reshape(-1, 256)


def _iq2_s(b: U8) -> tuple[F32, I8]:
    """float16 d · 32 low bytes of indices · 32 bytes of signs · 32 x 2 high bits · 16 halves: scales of 16 elements."""
    high = (b[:, 66:74, None] >> np.array([0, 2, 4, 6], np.uint8) & 3).reshape(-1, 32).astype(np.int32)
    q = _grid("iq2_s")[b[:, 2:34] | high << 8] * _signs()[b[:, 34:66]]
    return _odd(half(b, 0), _half_bytes(b[:, 74:82]), 1 / 8), q.reshape(-1, 256)


def _iq3_s(b: U8) -> tuple[F32, I8]:
    """float16 d · 64 low bytes of indices · 64 high bits · 32 bytes of signs · 8 halves: scales of 32 elements."""
    high = np.unpackbits(b[:, 66:74], axis=1, bitorder="little").astype(np.int32)
    q = _grid("iq3_s")[b[:, 2:66] | high << 8].reshape(-1, 32, 8) * _signs()[b[:, 74:106]]
    return _odd(half(b, 0), _half_bytes(b[:, 106:110]), 1), q.reshape(-1, 256)


def _tq1_0(b: U8) -> tuple[F32, I8]:
    """Bytes of five digits in base 3, as fractions of 256, 32, 16 and (of four digits) 4 side by side · float16 d."""
    powers = np.array([1, 3, 9, 27, 81], np.uint8)[:, None]
    runs = ((b[:, :32], powers), (b[:, 32:48], powers), (b[:, 48:52], powers[:4]))
    fractions = np.concatenate([(run[:, None] * by).reshape(len(b), -1) for run, by in runs], axis=1)
    digits = (fractions.astype(np.uint16) * np.uint16(3) >> np.uint16(8)).astype(np.int8)
    return half(b, 52), digits - np.int8(1)


def _tq2_0(b: U8) -> tuple[F32, I8]:
    """Of each 32 bytes the lowest two bits q, then the next · float16 d: d (q - 1)."""
    q = b[:, :64].reshape(-1, 2, 1, 32) >> np.array([0, 2, 4, 6], np.uint8)[:, None] & 3
    return half(b, 64), q.reshape(-1, 256).astype(np.int8) - np.int8(1)


def _q1_0(b: U8) -> tuple[F32, I8]:
    """float16 d · 128 bits, the lowest first: d where set, else -d."""
    bits = np.unpackbits(b[:, 2:], axis=1, bitorder="little").astype(np.int8)
    return half(b, 0), bits * np.int8(2) - np.int8(1)


def _nvfp4(b: U8) -> tuple[F32, I8]:
    """4 scales (floats of 4 exponent and 3 mantissa bits without sign; 127 is 0) of 16 elements · 64 codes of E2M1, of
    each 8 bytes the low halves, then the high halves. In halves of a unit."""
    exponents, mantissas = (b[:, :4] >> 3 & 15).astype(np.int32), (b[:, :4] & 7).astype(np.float32)
    normal = np.ldexp(mantissas + np.float32(8), exponents - 10)
    scales = np.where(exponents == 0, np.ldexp(mantissas, -9), normal) * np.float32(0.5)
    codes = b[:, 4:].reshape(-1, 4, 8)
    q = TWICE.astype(np.int8)[np.concatenate([codes & 15, codes >> 4], axis=2)]
    return np.where(b[:, :4] == 127, np.float32(0), scales), q.reshape(-1, 64)


FORMATS = (
    Rewritten("IQ1_S", 256, 50, _iq1_s, IQ1_CODES),
    Rewritten("IQ1_M", 256, 56, _iq1_m, IQ1_CODES),
    Rewritten("IQ2_XXS", 256, 66, _iq2_xxs, IQ2_CODES),
    Rewritten("IQ2_XS", 256, 74, _iq2_xs, IQ2_CODES),
    Rewritten("IQ2_S", 256, 82, _iq2_s, IQ2_CODES),
    Rewritten("IQ3_XXS", 256, 98, _iq3_xxs, IQ3_CODES),
    Rewritten("IQ3_S", 256, 110, _iq3_s, INT4_32, 2, -15),
    Rewritten("TQ1_0", 256, 54, _tq1_0, INT4_128, 1, -1),
    Rewritten("TQ2_0", 256, 66, _tq2_0, INT4_128, 1, -1),
    Rewritten("Q1_0", 128, 18, _q1_0, INT4_128, 2, -1),
    Rewritten("NVFP4", 64, 36, _nvfp4, E2M1_16, 2),
)
