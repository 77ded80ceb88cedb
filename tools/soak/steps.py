"""The steps of the models under load, from their statistics records: how long each took besides the model."""

import json

# Longer than any step may take besides the model. A guide once held steps for 6 s each. The server may have been
# stopped for 2 s, and a machine with other work makes a thread wait.
HELD_S = 5


class Steps:
    """The records of all models, in files of a folder."""

    def __init__(self, folder):
        self._folder = folder
        # By model: the number of steps until now, their time besides the model, and the longest of these.
        self._figures = {}

    def figures(self):
        """Step times by model, in milliseconds."""
        found = {}
        for model, (number, sum_s, max_s) in self._figures.items():
            mean_ms, max_ms = (round(1e3 * time_s, 3) for time_s in (sum_s / number, max_s))
            found[model] = {"steps": number, "besides_model_ms_mean": mean_ms, "besides_model_ms_max": max_ms}
        return found

    def look(self):
        """Reads and removes the records that there are; returns what held a step for too long, in words."""
        found = []
        for path in sorted(self._folder.iterdir()):
            # The files are only appended to, and nothing is written while the server is idle.
            lines = path.read_bytes().splitlines()
            path.write_bytes(b"")
            for record in map(json.loads, lines):
                held_s = (record["Step Duration (us)"] - record["Model Duration (us)"]) / 1e6
                self._add(path.stem, held_s)
                if held_s > HELD_S:
                    found.append(f"step {record['Iteration Counter']} of {path.stem} took {held_s:.1f} s besides the model")
        return found

    def _add(self, model, held_s):
        number, sum_s, max_s = self._figures.get(model, (0, 0.0, 0.0))
        self._figures[model] = number + 1, sum_s + held_s, max(max_s, held_s)
