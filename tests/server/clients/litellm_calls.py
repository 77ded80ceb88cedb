"""Calls with litellm, for test_litellm.py. Prints what they give as JSON."""

import json
import sys

import litellm

url, prompt, tools = sys.argv[1], sys.argv[2], json.loads(sys.argv[3])
server = {"api_base": f"{url}/v1", "api_key": "any", "max_retries": 0}
messages = [{"role": "user", "content": prompt}]


def failure(call, **fields):
    """The kind and the status of what is raised."""
    try:
        call(**fields, **server)
    except litellm.exceptions.APIError as error:
        return [type(error).__name__, error.status_code]
    except Exception as error:
        return [type(error).__name__, getattr(error, "status_code", None)]


chat = {"model": "openai/chat", "messages": messages, "max_tokens": 20, "seed": 7, "temperature": 0.8}
whole = litellm.completion(**chat, logprobs=True, top_logprobs=2, **server)
chunks = list(litellm.completion(**chat, stream=True, stream_options={"include_usage": True}, **server))
called = litellm.completion(model="openai/chat", messages=messages, tools=tools, tool_choice="required", **server)
text = litellm.text_completion(model="text-completion-openai/chat", prompt=prompt, max_tokens=20, **server)
response = litellm.responses(model="openai/chat", input=prompt, max_output_tokens=20, **server)
embedding = litellm.embedding(model="openai/qwen3", input=[prompt, "The end."], **server)


def reranked(model, path):
    """The order and the scores of documents, by the provider that a model's name begins with."""
    documents = ["The end.", prompt, "A bear."]
    answer = litellm.rerank(model=model, query=prompt, documents=documents, top_n=2, api_base=f"{url}{path}", api_key="any")
    return [[result["index"], result["relevance_score"]] for result in answer.results]


results = {
    "chat": whole.model_dump(),
    "stream": "".join(chunk.choices[0].delta.content or "" for chunk in chunks if chunk.choices),
    "stream_usage": chunks[-1].usage.model_dump(),
    "rebuilt": litellm.stream_chunk_builder(chunks, messages=messages).choices[0].message.content,
    "call": called.choices[0].message.tool_calls[0].function.model_dump(),
    "text": text.choices[0].text,
    "response": response.output[0].content[0].text,
    "embedding": [row["embedding"] for row in embedding.data],
    "reranked": [
        reranked("cohere/reranker", "/v2/rerank"),
        reranked("jina_ai/reranker", "/v1/rerank"),
        reranked("hosted_vllm/reranker", ""),
        reranked("huggingface/reranker", ""),
    ],
    "unknown_model": failure(litellm.completion, model="openai/tales", messages=messages),
    "bad_option": failure(litellm.completion, model="openai/chat", messages=messages, temperature=101),
}
print(json.dumps(results))
