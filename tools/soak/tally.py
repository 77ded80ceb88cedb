"""Counts of what was tried, findings, and how a report is shown."""

import collections
import json
import sys
import threading

MAX_TOLD = 50


class Tally:
    """Counts by name, findings, and known problems of Triton. Thread-safe."""

    def __init__(self):
        self._lock = threading.Lock()
        self.counts = collections.Counter()
        self.options = collections.Counter()
        self.findings = []
        self.of_triton = []

    def count(self, name, by=1):
        with self._lock:
            self.counts[name] += by

    def tried(self, content):
        """Counts the options of a request."""
        with self._lock:
            self.options.update(name for name, _ in content.options)

    def finding(self, kind, text):
        """Records a violated invariant. All are counted, and the first ones are printed."""
        with self._lock:
            self.counts[f"findings: {kind}"] += 1
            if len(self.findings) < MAX_TOLD:
                self.findings.append(f"{kind}: {text}")
                print(f"{kind}: {text}", file=sys.stderr, flush=True)

    def tritons(self, kind, text):
        """Records a known problem of the server itself."""
        with self._lock:
            self.counts[f"of Triton's own: {kind}"] += 1
            if len(self.of_triton) < MAX_TOLD:
                self.of_triton.append(f"{kind}: {text}")


def show(found, as_json):
    """Prints a report."""
    if as_json:
        print(json.dumps(found), flush=True)
        return
    for name, value in found.items():
        if isinstance(value, dict):
            print(f"{name}:")
            for key, of_key in value.items():
                print(f"  {str(of_key):>9}  {key}")
        elif isinstance(value, list):
            print(f"{name}: {len(value)}")
            for item in value:
                print(f"  {item}")
        else:
            print(f"{name}: {value}")
