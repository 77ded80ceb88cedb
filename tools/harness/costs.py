"""The cost of rounding to bf16 for the demo model: how far the logits of two servers may be from each other."""

import json

from harness.repository import ROOT

# tests/fixtures/make_stories_costs.py
OF_STORIES = json.loads((ROOT / "tests" / "fixtures" / "stories.json").read_text())["bf16_cost"]
