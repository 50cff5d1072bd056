"""The ledger and metrics.jsonl."""

import json

import pytest

from sera_jax.labels.ledger import Ledger
from sera_jax.report.metrics import MetricsWriter, read_metrics


def test_the_ledger_adds_up_and_survives_a_round_trip():
    ledger = Ledger()
    ledger.add("verifier", stage="execution", purpose="root")
    ledger.add("verifier", stage="rubric", purpose="branch", calls=8)
    ledger.add("policy", stage="execution", purpose="score", tokens_in=40, tokens_out=5)
    assert ledger.total("verifier") == 9 and ledger.total("verifier", purpose="branch") == 8
    assert ledger.total("policy", "tokens_in") == 40
    assert ledger.totals() == {
        "policy/score/calls": 1,
        "policy/score/tokens_in": 40,
        "policy/score/tokens_out": 5,
        "verifier/branch/calls": 8,
        "verifier/root/calls": 1,
    }
    again = Ledger.from_dict(json.loads(json.dumps(ledger.to_dict())))
    again.add("verifier", stage="execution", purpose="root")
    assert again.total("verifier") == 10 and ledger.total("verifier") == 9


def test_the_ledger_refuses_what_it_never_wrote():
    with pytest.raises(ValueError, match="calls=-1: a ledger only grows"):
        Ledger().add("judge", stage="rubric", purpose="branch", calls=-1)
    for data in ({"verifier/root": 1}, {"verifier/execution/root/euros": 1}, {"a/b/c/calls": -1}):
        with pytest.raises(ValueError, match="is not SOURCE/STAGE/PURPOSE/FIELD: COUNT"):
            Ledger.from_dict(data)


def test_metrics_are_flat_lines(tmp_path):
    writer = MetricsWriter(tmp_path / "m.jsonl")
    writer.write(0, "train", {"stage": "execution", "loss": 0.5, "bad": float("nan")})
    (row,) = read_metrics(tmp_path / "m.jsonl")
    assert row == {
        "version": 0,
        "kind": "train",
        "stage": "execution",
        "loss": 0.5,
        "bad": None,
        "nonfinite_metrics": 1,
    }


def test_resuming_drops_what_will_be_written_again(tmp_path):
    path = tmp_path / "m.jsonl"
    writer = MetricsWriter(path)
    writer.write(0, "eval/dev", {"success": 0.1})
    for version in range(4):
        writer.write(version, "train", {"loss": version})
    writer.write(2, "eval/dev", {"success": 0.2})
    writer.close()
    with path.open("a") as file:
        file.write('{"version": 4, "kind": "tr')  # killed in the middle of a line
    writer = MetricsWriter(path, resume_from=2)
    writer.write(2, "train", {"loss": 20})
    kept = [(row["version"], row["kind"]) for row in read_metrics(path)]
    # The evaluation of the checkpointed weights stays; versions 2 and 3 run again.
    assert kept == [(0, "eval/dev"), (0, "train"), (1, "train"), (2, "eval/dev"), (2, "train")]
    assert MetricsWriter(path).write(0, "train", {}) is None
    assert len(read_metrics(path)) == 1  # None starts anew
