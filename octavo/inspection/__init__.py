"""What a model is, what it will take, and what to look out for: told from headers, no weight is read.

Sizes are those of start-up: `octavo.build` and `octavo.resolve` compute them for both.
"""

from __future__ import annotations

from dataclasses import replace

from octavo.build import form_of, model_headers, open_model
from octavo.config import EngineConfig
from octavo.inspection.facts import Inspection
from octavo.inspection.memory import here, on_gpus
from octavo.inspection.reading import rope, tensors_of, text_facts, text_of, windows
from octavo.inspection.telling import as_json, as_text
from octavo.inspection.traps import traps
from octavo.layers.moe import MoE
from octavo.models.weights import SHOWN, fit

__all__ = ["Inspection", "as_json", "as_text", "inspect"]


def inspect(config: EngineConfig, gpu_memory: int | None = None, ranks: int = 1) -> Inspection:
    """Look at the model that `config` names.

    `gpu_memory`: bytes of each of `ranks` GPUs among which the model is divided; None looks at this machine.
    Raises ValueError of the kind at fault, as start-up does, where not even the headers make sense; what would only
    stop a start is a warning.
    """
    warnings: list[str] = []
    with model_headers(config) as (path, stays), open_model(path) as checkpoint:
        form = form_of(config, checkpoint)
        c = form.config
        whole = form.architecture.make(c, c.max_position_embeddings)
        plan, problems = fit(whole, checkpoint, form.architecture.names(c), form.architecture.ignore(c))
        if problems:
            more = f"; and {len(problems) - SHOWN} more" if len(problems) > SHOWN else ""
            warnings.append(
                f"The files do not fit the architecture and are refused: {'; '.join(problems[:SHOWN])}{more}."
            )
        tensors, parameters, active = tensors_of(whole, plan, checkpoint)
        text = text_of(replace(config, model=str(path), revision=None), warnings)
        if gpu_memory is None and ranks == 1:
            memory = here(config, checkpoint, form, warnings)
        else:
            memory = on_gpus(config, checkpoint, form, gpu_memory, ranks, warnings)
        length = max((place.max_model_len for place in memory), default=c.max_position_embeddings)
        warnings += [f"{warning}." for warning in traps(checkpoint, form, whole, tensors, text, length)]
        mixtures = [layer for block in whole.blocks for layer in vars(block).values() if isinstance(layer, MoE)]
        return Inspection(
            model=config.model,
            path=str(path) if stays else config.model,
            architecture=form.architecture.name,
            layers=c.layers,
            hidden_size=c.hidden_size,
            heads=c.heads,
            kv_heads=whole.kv.kv_heads,
            head_dim=whole.kv.head_dim,
            vocabulary=c.vocab_size,
            context=c.max_position_embeddings,
            rope=rope(c, whole),
            windows=windows(whole),
            experts=c.experts,
            experts_per_token=max((layer.rule.top_k for layer in mixtures), default=0),
            parameters=parameters,
            active_parameters=active,
            file_bytes=checkpoint.total_bytes,
            tied=whole.lm_head is None,
            tensors=tensors,
            text=None if text is None else text_facts(text),
            notes=form.notes,
            memory=memory,
            warnings=tuple(warning if stays else warning.replace(str(path), config.model) for warning in warnings),
        )
