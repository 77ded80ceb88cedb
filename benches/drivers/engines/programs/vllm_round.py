"""One round of vLLM, in its own environment: one JSON object per line."""

import argparse
import json
import time

import numpy

import moments


def run(engine, rng, concurrency, num_input, num_output):
    """The arrival times of each request's tokens, in seconds from the start."""
    from vllm import SamplingParams

    params = SamplingParams(
        temperature=0, max_tokens=num_output, min_tokens=num_output, ignore_eos=True, detokenize=False
    )
    prompts = [{"prompt_token_ids": rng.integers(300, 1000, num_input).tolist()} for _ in range(concurrency)]
    came = {str(number): [] for number in range(concurrency)}
    start = time.perf_counter()
    for name, prompt in zip(came, prompts):
        engine.add_request(name, prompt, params)
    while engine.has_unfinished_requests():
        answers = engine.step()
        now = time.perf_counter() - start
        for answer in answers:
            request = came[answer.request_id]
            request += [now] * (len(answer.outputs[0].token_ids) - len(request))
    return list(came.values())


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("model")
    parser.add_argument("--loads", type=moments.loads)
    options = parser.parse_args()
    from vllm import LLM

    loads = options.loads.values()
    llm = LLM(
        options.model,
        dtype="bfloat16",
        max_model_len=max(num_input + num_output for _, num_input, num_output in loads),
        max_num_seqs=max(concurrency for concurrency, _, _ in loads),
        max_num_batched_tokens=2048,
        enable_prefix_caching=False,
    )
    rng = numpy.random.default_rng(0)
    # One-time work is not measured.
    for load in loads:
        run(llm.llm_engine, rng, *moments.small(load))
    for name, load in options.loads.items():
        rate = moments.rate(load[1], run(llm.llm_engine, rng, *load))
        print(json.dumps({"load": name, "rate": rate}), flush=True)


if __name__ == "__main__":
    main()
