"""OpenVINO GenAI's continuous batching, run by its own Python: requests come as lines of JSON, and so do answers.

    python openvino_engine.py MODEL.gguf

It has no server of its own, so its figures hold no HTTP. The first line it prints tells its version.
A line {"asks": [[prompt, tokens], ...], "concurrency": n} is answered by {"outcomes": [{"asked", "ended", "times",
"prompt_tokens", "output_tokens"}, ...]} in seconds of `time.perf_counter`; {"ids": [...]} by {"token": the next one}.
"""

import json
import sys
import time

import numpy as np
import openvino
import openvino_genai as genai


def settings(tokens):
    made = genai.GenerationConfig()
    made.max_new_tokens = made.min_new_tokens = tokens
    made.ignore_eos, made.do_sample, made.apply_chat_template = True, False, False
    return made


def run(pipe, asks, concurrency):
    """Keep `concurrency` requests under way until all are answered."""
    tokenizer = pipe.get_tokenizer()
    lengths = [tokenizer.encode(prompt).input_ids.shape[1] for prompt, _ in asks]
    outcomes, handles, following = [None] * len(asks), {}, 0
    while following < len(asks) or handles:
        while following < len(asks) and len(handles) < concurrency:
            prompt, tokens = asks[following]
            now = time.perf_counter()
            outcomes[following] = {"asked": now, "ended": now, "times": [], "output_tokens": 0}
            outcomes[following]["prompt_tokens"] = lengths[following]
            handles[following] = pipe.add_request(following, prompt, settings(tokens))
            following += 1
        pipe.step()
        now = time.perf_counter()
        for index in list(handles):
            while handles[index].can_read():
                for output in handles[index].read().values():
                    outcomes[index]["output_tokens"] += len(output.generated_ids)
                    outcomes[index]["times"] += [now] * len(output.generated_ids)
            if outcomes[index]["output_tokens"] >= asks[index][1]:
                outcomes[index]["ended"] = now
                del handles[index]
    return outcomes


def next_token(pipe, ids, number):
    handle = pipe.add_request(number, openvino.Tensor(np.array([ids], np.int64)), settings(1))
    while not handle.can_read():
        pipe.step()
    found = next(iter(handle.read().values())).generated_ids[0]
    while pipe.has_non_finished_requests():
        pipe.step()
    return found


def main():
    scheduler = genai.SchedulerConfig()
    scheduler.cache_size, scheduler.max_num_seqs, scheduler.max_num_batched_tokens = 4, 128, 512
    scheduler.enable_prefix_caching = True
    pipe = genai.ContinuousBatchingPipeline(sys.argv[1], scheduler, "CPU")
    print(json.dumps({"version": genai.__version__}), flush=True)
    for number, line in enumerate(sys.stdin):
        said = json.loads(line)
        if "ids" in said:
            answer = {"token": next_token(pipe, said["ids"], 10**6 + number)}
        else:
            answer = {"outcomes": run(pipe, said["asks"], said["concurrency"])}
        print(json.dumps(answer), flush=True)


if __name__ == "__main__":
    main()
