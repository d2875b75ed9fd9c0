"""Offline use: `LLM(...).generate(prompts, params)`, with the engine in this process."""

from __future__ import annotations

import itertools
import logging
import random
import threading
from collections.abc import Callable, Mapping, Sequence
from types import TracebackType
from typing import Any

from tqdm import tqdm

from octavo.build import build, build_text
from octavo.config import DEFAULT_MODEL, EngineConfig
from octavo.info import ModelInfo
from octavo.offline.beam import Search, search
from octavo.offline.inputs import Prompt, PromptType, read_prompts
from octavo.offline.metrics import Metric, RequestTimes, metrics_of
from octavo.offline.run import Interrupts, Job, forget, run
from octavo.ops.contract import Profiled
from octavo.outputs import BeamSearchOutput, RequestOutput
from octavo.sampling_params import BeamSearchParams, ParameterError, SamplingParams
from octavo.text.request import RequestFactory
from octavo.text.template import ChatTemplate, Message, joined_parts, texts_in
from octavo.text.tokenizer import Tokenizer
from octavo.types import Request, TokenLogprobs
from octavo.wire import Engine

logger = logging.getLogger(__name__)

Params = SamplingParams | Sequence[SamplingParams] | None
Progress = bool | Callable[..., Any]
"""Whether to show a progress bar, or what to make it with (called as tqdm is)."""


class LLM:
    """A model to generate text with.

    Args:
        model: repository, folder, GGUF file, or a built-in alias.
        options: fields of `EngineConfig`, as vLLM names them.

    Raises:
        TypeError: an option that does not exist.
        ValueError: the model cannot be found or run, or an option is wrong; one sentence says what to do.
    """

    def __init__(self, model: str = DEFAULT_MODEL, **options: Any) -> None:
        config = EngineConfig.from_keywords(model=model, **options)
        text = build_text(config)
        with _LoadingBar() as bar:
            built = build(config, bar)
        for note in built.info.notes:
            logger.info("%s", note)
        self._set(
            config,
            built.engine,
            built.info,
            text.tokenizer,
            text.template,
            text.factory(built.info, config),
            built.profiled,
        )

    @classmethod
    def of(
        cls,
        config: EngineConfig,
        engine: Engine,
        info: ModelInfo,
        tokenizer: Tokenizer,
        template: ChatTemplate | None,
        factory: RequestFactory,
        profiled: Profiled | None = None,
    ) -> LLM:
        """An LLM of parts that are built already."""
        llm = cls.__new__(cls)
        llm._set(config, engine, info, tokenizer, template, factory, profiled)
        return llm

    def _set(
        self,
        config: EngineConfig,
        engine: Engine,
        info: ModelInfo,
        tokenizer: Tokenizer,
        template: ChatTemplate | None,
        factory: RequestFactory,
        profiled: Profiled | None,
    ) -> None:
        self.config = config
        self.info = info
        self.profiled = profiled
        """What times the operations of the model's steps; None on a device that cannot."""
        self._engine = engine
        self._tokenizer = tokenizer
        self._template = template
        self._factory = factory
        self._requests = itertools.count()
        self._serial = itertools.count()
        self._seeds = random.Random(config.seed)
        self._times = RequestTimes()
        self._lock = threading.Lock()
        """One call at a time drives the engine."""
        self._closed = False

    # -- what a caller does ----------------------------------------------------------------------------------------

    def generate(
        self,
        prompts: PromptType | Sequence[PromptType],
        sampling_params: Params = None,
        *,
        use_tqdm: Progress = True,
        lora_request: Any = None,
        priority: Sequence[int] | None = None,
    ) -> list[RequestOutput]:
        """Continue prompts; the outputs are in their order.

        Args:
            prompts: text, token ids, a dict with either (and `cache_salt`), or a list of these.
            sampling_params: one for all, or one per prompt; None takes the model's defaults.
            priority: one number per prompt; lower runs first, with scheduling_policy="priority".

        Raises:
            ValueError: a prompt is empty or too long, a parameter does not fit the model, or lists differ in length;
                nothing has run then. A request that fails while it runs ends with finish reason "error" instead.
        """
        _no_lora(lora_request)
        return self._generate(read_prompts(prompts), sampling_params, use_tqdm, priority)

    def chat(
        self,
        messages: Sequence[Message] | Sequence[Sequence[Message]],
        sampling_params: Params = None,
        use_tqdm: Progress = True,
        lora_request: Any = None,
        *,
        priority: Sequence[int] | None = None,
        chat_template: str | None = None,
        chat_template_content_format: str = "auto",
        add_generation_prompt: bool = True,
        continue_final_message: bool = False,
        tools: Sequence[Mapping[str, Any]] | None = None,
        chat_template_kwargs: Mapping[str, Any] | None = None,
    ) -> list[RequestOutput]:
        """Answer conversations: one list of messages, or a list of such lists.

        Control tokens spelled out in a message stay plain text, so that no message can forge a turn.

        Raises:
            ValueError: as `generate`; or the template cannot render the messages.
        """
        _no_lora(lora_request)
        if not isinstance(messages, Sequence) or isinstance(messages, str):
            raise ValueError(f"messages must be a list of messages, or of such lists, got {type(messages).__name__}.")
        template = self._template
        if chat_template is not None or chat_template_content_format != "auto":
            template = ChatTemplate.of(self._tokenizer, chat_template, chat_template_content_format)
        if not template:
            raise ValueError("The model has no chat template: pass chat_template, or use generate.")
        several = bool(messages) and not isinstance(messages[0], Mapping)
        conversations: Any = messages if several else [messages]
        prompts = []
        for conversation in conversations:
            options: dict[str, Any] = {
                "add_generation_prompt": add_generation_prompt,
                "continue_final_message": continue_final_message,
                "tools": tools,
                "variables": chat_template_kwargs,
            }
            text = template.render(conversation, **options)
            given = "\0".join(texts_in([conversation, tools, chat_template_kwargs]) + joined_parts(conversation))
            if self._tokenizer.control_pattern.search(given):  # typed by somebody: it stays text, as in the server
                ids = template.encode(self._tokenizer, conversation, parse_special=False, **options)
            else:
                ids = self._tokenizer.encode(text, add_special_tokens=False)
            prompts.append(Prompt(text, tuple(ids)))
        return self._generate(prompts, sampling_params, use_tqdm, priority)

    def beam_search(
        self,
        prompts: PromptType | Sequence[PromptType],
        params: BeamSearchParams,
        lora_request: Any = None,
        use_tqdm: Progress = False,
    ) -> list[BeamSearchOutput]:
        """The `beam_width` best sequences of each prompt; their tokens and text begin with the prompt.

        Raises:
            ValueError: a prompt is empty or too long.
        """
        _no_lora(lora_request)
        self._check_open()
        searches = []
        for prompt in read_prompts(prompts):
            ids = self._factory.encode(prompt.text or "" if prompt.ids is None else prompt.ids)
            room = min(params.max_tokens, self.info.max_model_len - len(ids))
            searches.append(Search(ids, params, frozenset(self._factory.eos_ids), room))
        with self._lock, Interrupts() as interrupts, self._bar(use_tqdm, params.max_tokens, "Beam steps") as bar:

            def ask(histories: list[tuple[int, ...]], k: int) -> list[TokenLogprobs]:
                interrupts.check()
                answers = self._next_tokens(histories, k)
                bar.update(1)
                return answers

            search(searches, ask)
        outputs = [BeamSearchOutput(one.sequences()) for one in searches]
        for output in outputs:
            for sequence in output.sequences:
                sequence.text = self._tokenizer.decode(sequence.tokens, skip_special_tokens=params.skip_special_tokens)
        # beams that grew from one share its steps
        steps = {id(step): step for output in outputs for sequence in output.sequences for step in sequence.logprobs}
        for step in steps.values():
            for token, candidate in step.items():
                candidate.decoded_token = self._tokenizer.token(token)
        return outputs

    def get_tokenizer(self) -> Tokenizer:
        return self._tokenizer

    def get_default_sampling_params(self) -> SamplingParams:
        """What `generate` uses when no parameters are given: Octavo's defaults under the model's own."""
        return self._factory.defaults()

    def get_metrics(self) -> list[Metric]:
        """Counters, gauges and histograms since the start, under vLLM's names."""
        return metrics_of(self._engine.stats(), self._times, self.info.model)

    def close(self) -> None:
        """Free the model's memory. May be called again."""
        if not self._closed:
            self._closed = True
            self._engine.close()

    def __enter__(self) -> LLM:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    # -- how it is done --------------------------------------------------------------------------------------------

    def _generate(
        self, prompts: Sequence[Prompt], params: Params, use_tqdm: Progress, priority: Sequence[int] | None
    ) -> list[RequestOutput]:
        self._check_open()
        each = self._params(params, len(prompts))
        if priority is not None and len(priority) != len(prompts):
            raise ValueError(f"there are {len(prompts)} prompts but {len(priority)} priorities.")
        jobs = []
        for index, (prompt, sampling) in enumerate(zip(prompts, each, strict=True)):
            request = self._request(str(next(self._requests)), prompt, sampling, priority[index] if priority else 0)
            jobs.append(Job.of(request, self._factory.output(request), prompt.text, self._tokenizer.token))
        with self._lock, self._bar(use_tqdm, len(jobs), "Processed prompts") as bar:
            run(self._engine, jobs, self._times, lambda job: bar.update(1))
        return [job.output for job in jobs]

    def _check_open(self) -> None:
        if self._closed:
            raise RuntimeError("This LLM is closed: make another one.")

    def _request(self, request_id: str, prompt: Prompt, sampling: SamplingParams, priority: int = 0) -> Request:
        return self._factory.make(
            request_id,
            prompt.text or "" if prompt.ids is None else prompt.ids,
            sampling,
            cut_max_tokens=True,
            seed=self._seeds.getrandbits(63),
            arrival=next(self._serial),
            priority=priority,
            salt=prompt.salt,
        )

    def _params(self, params: Params, count: int) -> Sequence[SamplingParams]:
        if params is None:
            params = self.get_default_sampling_params()
        if isinstance(params, SamplingParams):
            return [params] * count
        if not isinstance(params, Sequence) or not all(isinstance(one, SamplingParams) for one in params):
            raise ParameterError(
                f"sampling_params must be a SamplingParams, or a list with one per prompt, got {params!r}.",
                "sampling_params",
                params,
            )
        if len(params) != count:
            raise ParameterError(
                f"there are {count} prompts but {len(params)} sampling_params: give one for all, or one per prompt.",
                "sampling_params",
                len(params),
            )
        return params

    def _next_tokens(self, histories: Sequence[tuple[int, ...]], k: int) -> list[TokenLogprobs]:
        """The `k` most probable tokens after each history."""
        sampling = SamplingParams(temperature=0, max_tokens=1, logprobs=min(k, self.info.vocab_size))
        found: dict[str, TokenLogprobs] = {}
        ids = [f"beam/{next(self._serial)}" for _ in histories]
        try:
            for request_id, history in zip(ids, histories, strict=True):
                self._engine.add(Request(id=request_id, prompt=history, sampling=sampling, seed=0, max_tokens=1))
            while len(found) < len(ids) and not self._engine.idle:
                for delta in self._engine.step():
                    if delta.finish == "error":
                        raise RuntimeError(f"a step of the beam search failed: {delta.error}")
                    if delta.logprobs:
                        found[delta.request] = delta.logprobs[0]
        except BaseException:
            forget(self._engine, ids)
            raise
        return [found[request_id] for request_id in ids]

    def _bar(self, wanted: Progress, total: int, what: str) -> Any:
        make = wanted if callable(wanted) else tqdm
        return make(total=total, desc=what, dynamic_ncols=True, disable=not wanted)


class _LoadingBar:
    """Shows how far loading is, where anyone looks at it."""

    def __init__(self) -> None:
        self._bar: Any = None

    def __enter__(self) -> _LoadingBar:
        return self

    def __call__(self, what: str, done: int, total: int) -> None:
        if self._bar is None:
            self._bar = tqdm(total=total, desc=what, disable=None, leave=False, unit="")
        self._bar.update(done - self._bar.n)

    def __exit__(self, *_: object) -> None:
        if self._bar is not None:
            self._bar.close()


def _no_lora(lora_request: Any) -> None:
    if lora_request is not None:
        raise ParameterError(
            "LoRA adapters are not built yet: leave lora_request out, or merge the adapter into the checkpoint.",
            "lora_request",
            lora_request,
        )
