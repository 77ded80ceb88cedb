"""The cost of rounding to bf16 for the demo model: how far its logits may be from those of a server that rounds elsewhere."""

import json

from harness.repository import ROOT

# tests/fixtures/make_stories_costs.py
OF_STORIES = json.loads((ROOT / "tests" / "fixtures" / "stories.json").read_text())["bf16_cost"]
