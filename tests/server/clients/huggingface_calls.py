"""Asks a model that embeds, or one that classifies, by Hugging Face's client; prints the answers as JSON."""

import json
import sys

from huggingface_hub import InferenceClient
from huggingface_hub.errors import HfHubHTTPError

url, task, text = sys.argv[1:]


def status(call, **fields):
    """The status of the error that is raised."""
    try:
        call(**fields)
    except HfHubHTTPError as error:
        return error.response.status_code


def embed(client):
    return {
        "raw": client.feature_extraction(text, normalize=False, truncate=True).tolist(),
        "default": client.feature_extraction(text).tolist(),
        "mistake": status(client.feature_extraction, text=text, prompt_name="query"),
    }


def classify(client):
    return [[it.label, it.score] for it in client.text_classification([[text]])]


print(json.dumps({"embed": embed, "classify": classify}[task](InferenceClient(url))))
