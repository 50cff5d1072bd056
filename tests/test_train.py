"""The loop end to end at smoke size: resume, refusals, log-probs, custom objectives, the command line."""

import dataclasses
import json
import signal
import subprocess
import sys
import time
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from experiments.configs import textcraft_sera
from sera_jax.learner.packing import pack
from sera_jax.learner.update import row_logprobs
from sera_jax.objectives import LossOutputs, supervised
from sera_jax.recursion.assignment import assign_credit, execution_samples
from sera_jax.report.metrics import read_metrics
from sera_jax.run_directory import RunMismatchError
from sera_jax.schedule import Schedule
from sera_jax.train import RolloutError, check_trees, train
from sera_jax.types import Stage
from sera_jax.warm_start import check_demonstration
from tests.support import trees as T

SMOKE = textcraft_sera.make("smoke")
ROOT = Path(__file__).parent.parent


def steps(number: int, **changes):
    run = dataclasses.replace(SMOKE.run, steps=number)
    return dataclasses.replace(SMOKE, run=run, **changes)


def without_seconds(path: Path):
    return [{k: v for k, v in row.items() if not k.startswith("seconds/")} for row in read_metrics(path)]


def assert_same_run(a: Path, b: Path):
    # Evaluations at the end of the shorter run are extra; everything else must be equal.
    rows_a, rows_b = (
        [r for r in without_seconds(p / "metrics.jsonl") if r["kind"] == "train"] for p in (a, b)
    )
    assert rows_a == rows_b and rows_a
    trees_a, trees_b = (sorted(p.name for p in (d / "trees").iterdir()) for d in (a, b))
    assert trees_a == trees_b
    for name in trees_a:
        assert (a / "trees" / name).read_bytes() == (b / "trees" / name).read_bytes()
    assert json.loads((a / "ledger.json").read_text()) == json.loads((b / "ledger.json").read_text())


@pytest.fixture(scope="module")
def whole(tmp_path_factory):
    """An uninterrupted run of 6 steps: all stages twice."""
    workdir = tmp_path_factory.mktemp("whole")
    return workdir, train(steps(6), workdir)


def test_a_run_leaves_what_it_should(whole):
    workdir, state = whole
    assert int(state.version) == 6
    rows = [r for r in read_metrics(workdir / "metrics.jsonl") if r["kind"] == "train"]
    assert [r["stage"] for r in rows] == ["execution", "delegation", "rubric"] * 2
    assert [r["version"] for r in rows] == list(range(6))
    for row in rows:
        assert row["trees"] == 8 and row["trees_invalid"] == 0
        if row["learner/trained_tokens"]:
            assert row["learner/logprob_gap_max"] < 1e-4
    # A resumed run proves something only if the updates were real.
    trained = {r["stage"] for r in rows if r["learner/trained_tokens"] and r["learner/grad_norm"] > 0}
    assert trained == set(Stage)
    kinds = {r["kind"] for r in read_metrics(workdir / "metrics.jsonl")}
    assert {"eval/trained_pairs", "eval/unseen_pairs"} <= kinds
    config = json.loads((workdir / "config.json").read_text())
    assert config["config"]["name"] == "textcraft_sera_smoke" and config["versions"]["jax"]
    assert json.loads((workdir / "ledger.json").read_text())


def test_a_run_can_be_looked_at(whole):
    from rich.console import Console

    from sera_jax.recursion.records import read_trees
    from sera_jax.report.curves import plot_run
    from sera_jax.report.progress import Progress
    from sera_jax.report.summary import print_summary

    workdir, _ = whole
    plot_run(workdir / "metrics.jsonl", workdir / "curves.png")
    assert (workdir / "curves.png").read_bytes()[:4] == b"\x89PNG"
    console = Console(record=True, width=90)
    print_summary(workdir, console)
    text = console.export_text()
    assert "root success" in text and "delegation" in text and "Verifier calls:" in text
    # A tree on disk is enough to see what a node wrote.
    tree = next(iter(read_trees(workdir / "trees" / "000000.jsonl.gz")))
    node = tree["nodes"][0]
    assert len(node["token_ids"]) == len(node["roles"]) == len(node["logprobs"]) and node["turns"]
    console = Console(record=True, width=90)
    progress = Progress(console)
    progress.phase("demonstrations", 2)
    progress.advance("one")
    progress.step(0, 2, Stage.EXECUTION, 8)
    progress.metrics(0, Stage.EXECUTION, {"env/root_success": 0.5}, 1.5)
    progress.close()
    assert "demonstrations: 1/2 one" in console.export_text(clear=False)
    assert "step 1/2 execution: success 0.50" in console.export_text()


def test_evaluate_command(whole):
    workdir, _ = whole
    base = [sys.executable, "-m", "experiments.evaluate", f"--workdir={workdir}", "--count=3"]
    run = lambda *a: subprocess.run([*base, *a], capture_output=True, text=True, cwd=ROOT)
    result = run()
    assert result.returncode == 0, result.stderr
    written = json.loads((workdir / "evaluations" / "trained_pairs-000006-n3.json").read_text())
    assert len(written["tasks"]) == 3 and written["version"] == 6
    assert written["success"] == sum(task["success"] for task in written["tasks"]) / 3
    result = run("--step=1")
    assert result.returncode == 2 and "has no step 1; whole steps: [5, 6]" in result.stdout
    result = run("--split=test")
    assert result.returncode == 2 and "is a run on a toy world" in result.stdout


def test_stop_and_resume_is_bitwise(whole, tmp_path):
    whole_dir, whole_state = whole
    train(steps(2), tmp_path)
    state = train(steps(6), tmp_path)
    for a, b in zip(jax.tree.leaves(whole_state), jax.tree.leaves(state), strict=True):
        np.testing.assert_array_equal(np.asarray(a), np.asarray(b))
    assert_same_run(whole_dir, tmp_path)


def test_kill_and_resume_is_bitwise(whole, tmp_path):
    whole_dir, whole_state = whole
    code = (
        "import dataclasses\nfrom experiments.configs import textcraft_sera as c\n"
        "from sera_jax.train import train\nconfig = c.make('smoke')\n"
        "run = dataclasses.replace(config.run, steps=6)\n"
        f"train(dataclasses.replace(config, run=run), {str(tmp_path)!r})\n"
    )
    process = subprocess.Popen([sys.executable, "-c", code])
    deadline = time.monotonic() + 240
    while time.monotonic() < deadline and process.poll() is None:
        done = [p.name for p in (tmp_path / "checkpoints").glob("[0-9]*")]
        if any(int(name) >= 2 for name in done if name.isdecimal()):
            break
        time.sleep(0.01)
    process.send_signal(signal.SIGKILL)
    process.wait()
    state = train(steps(6), tmp_path)
    for a, b in zip(jax.tree.leaves(whole_state), jax.tree.leaves(state), strict=True):
        np.testing.assert_array_equal(np.asarray(a), np.asarray(b))
    assert_same_run(whole_dir, tmp_path)


def test_a_changed_configuration_is_refused_with_the_difference(whole):
    workdir, _ = whole
    changed = dataclasses.replace(steps(6), seed=1)
    with pytest.raises(RunMismatchError, match=r"seed: 0 -> 1"):
        train(changed, workdir)
    with pytest.raises(RunMismatchError, match=r"own_objective: None -> 'supervised'"):
        train(steps(6), workdir, objective=supervised)
    with pytest.raises(RunMismatchError, match=r"own_schedule: None -> 'execution:1'"):
        train(steps(6), workdir, schedule=Schedule.parse("execution:1"))


def test_each_resumption_is_recorded_and_the_start_stays(whole, tmp_path):
    train(steps(0), tmp_path)
    first = json.loads((tmp_path / "config.json").read_text())
    assert "resumed" not in first
    train(steps(0), tmp_path)
    second = json.loads((tmp_path / "config.json").read_text())
    assert second["versions"] == first["versions"] and len(second["resumed"]) == 1


def test_a_failed_demonstration_is_not_taught():
    tools = T.toolbox()
    tree = T.play(tools, T.oracle_actor(tools, launch_probability=1.0), T.spec())
    check_demonstration(tree)
    tree.nodes[1].error = "TokenizerError: 'x' is not in the vocabulary"
    with pytest.raises(RuntimeError, match=r"task toy.a3a.2.test failed: TokenizerError: 'x'"):
        check_demonstration(tree)


@pytest.mark.parametrize("temperature", [1.0, 0.5])
def test_sampler_and_learner_agree_on_every_token(temperature):
    tools = T.toolbox()
    cfg, params = T.tiny_policy(tools)
    # Larger weights: a policy with opinions, so that the temperature matters.
    params = jax.tree.map(lambda x: x * 3 if x.ndim > 1 else x, params)
    spec = T.spec(Stage.EXECUTION, temperature=temperature)
    group = [T.play(tools, T.policy_actor(cfg, params), spec, index=k) for k in range(4)]
    group[0].nodes[0].success = True  # one success, so that there are advantages at all
    config = dataclasses.replace(SMOKE, rollout=dataclasses.replace(SMOKE.rollout, temperature=temperature))
    samples, _ = execution_samples([group], config)
    rows, _ = pack(samples, row_length=T.CONTEXT)
    logprobs = np.asarray(row_logprobs(params, cfg, jax.tree.map(jnp.asarray, rows)))
    assert rows.mask.sum() > 30
    np.testing.assert_allclose(logprobs[rows.mask], rows.old_logprobs[rows.mask], atol=1e-4)


def test_an_objective_of_ones_own(tmp_path):
    seen = []

    def constant(inputs):
        seen.append(inputs.logprob_T.shape)
        return LossOutputs(0.0 * inputs.logprob_T, {"mine": jnp.ones_like(inputs.logprob_T)})

    train(steps(1), tmp_path, objective=constant)
    row = next(r for r in read_metrics(tmp_path / "metrics.jsonl") if r["kind"] == "train")
    if row["learner/trained_tokens"]:
        assert seen and row["learner/mine_mean"] == 1.0 and row["learner/loss"] == 0.0


def test_when_all_trees_fail_the_run_says_why():
    tools = T.toolbox()
    tree = T.play(tools, T.oracle_actor(tools), T.spec())
    check_trees([[tree, dataclasses.replace(tree, error="error: EngineError: gone")]], version=3)
    with pytest.raises(RolloutError, match=r"all trees of version 3 failed, 2 of them with: error: gone"):
        check_trees([[dataclasses.replace(tree, error="error: gone")] * 2], version=3)


def test_a_step_without_trained_tokens_advances_the_version_and_says_so():
    assert assign_credit([[]], Stage.RUBRIC, SMOKE)[0] == []


def command(*arguments: str) -> subprocess.CompletedProcess:
    config = "--config=experiments/configs/textcraft_sera.py:smoke"
    return subprocess.run(
        [sys.executable, "-m", "experiments.train", config, *arguments],
        capture_output=True,
        text=True,
        cwd=ROOT,
    )


def test_dry_run_prints_the_arithmetic_and_writes_the_settings(tmp_path):
    result = command(f"--workdir={tmp_path}", "--dry_run", "--config.run.steps=250")
    assert result.returncode == 0, result.stderr
    assert "250 (84 execution, 83 delegation, 83 rubric)" in result.stdout
    settings = json.loads((tmp_path / "config.dry_run.json").read_text())
    assert settings["run"]["steps"] == 250 and not (tmp_path / "checkpoints").exists()


def test_a_bad_setting_is_refused_by_name(tmp_path):
    result = command(f"--workdir={tmp_path}", "--config.rollout.group_size=1")
    assert result.returncode == 2 and "rollout.group_size=1: at least 2 is expected" in result.stdout
    result = command(f"--workdir={tmp_path}", "--config.rollout.groups=4")
    assert result.returncode != 0 and "groups" in result.stderr
