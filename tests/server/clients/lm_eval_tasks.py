"""Evaluates tasks with lm-evaluation-harness, for test_lm_eval.py. Prints its samples as JSON."""

import json
import sys

from lm_eval import simple_evaluate
from lm_eval.tasks import TaskManager

url, folder, tokenizer = sys.argv[1:]
tasks = TaskManager(include_path=folder, include_defaults=False)


def evaluate(kind, path, task, **more):
    model = {"model": "stories", "base_url": url + path, "tokenizer": tokenizer, "tokenizer_backend": "huggingface"}
    model |= {"num_concurrent": 2, "max_retries": 1}
    results = simple_evaluate(model=kind, model_args=model, tasks=[task], task_manager=tasks, bootstrap_iters=0, **more)
    samples = sorted(results["samples"][task], key=lambda sample: sample["doc_id"])
    return {"metrics": results["results"][task], "answers": [sample["filtered_resps"] for sample in samples]}


answers = {
    "choices": evaluate("local-completions", "/v1/completions", "choices", batch_size=4),
    "text": evaluate("local-completions", "/v1/completions", "text"),
    "chat": evaluate("local-chat-completions", "/v1/chat/completions", "text", apply_chat_template=True),
}
print(json.dumps(answers, default=str))
