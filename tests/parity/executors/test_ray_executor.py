"""The same promises on a Ray cluster of three nodes, made here by Ray's own test cluster."""

from __future__ import annotations

import re
import shlex
import tomllib
from collections.abc import Iterator
from pathlib import Path

import jsonschema
import pytest
import yaml
from click import NoSuchOption

from parity.executors.cluster import RayExecutor, Starts, options
from parity.executors.item import Item, ItemError, Needs, State
from parity.executors.sweep import open_executor, run
from reports.cli import main
from tests.helpers import ROOT
from tests.parity.executors.test_executors import WORK, by_name, check_troubles

pytestmark = [
    pytest.mark.ray,
    # Ray's own: sockets of what it ended, and plans of its next version.
    pytest.mark.filterwarnings("ignore::ResourceWarning", "ignore::FutureWarning"),
    pytest.mark.filterwarnings("ignore::DeprecationWarning", "ignore::UserWarning"),
    pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning"),
]


@pytest.fixture(scope="module")
def cluster() -> Iterator[str]:
    from ray.cluster_utils import Cluster

    memory = 80 * 2**20
    head = {"num_cpus": 0, "object_store_memory": memory, "include_dashboard": False}
    nodes = Cluster(initialize_head=True, head_node_args=head)
    for _ in range(2):
        nodes.add_node(num_cpus=1, object_store_memory=memory, wait=False)
    nodes.wait_for_nodes()
    yield nodes.address
    nodes.shutdown()


def test_ray_keeps_the_same_promises(tmp_path: Path, cluster: str) -> None:
    check_troubles(tmp_path, "ray", cluster)


def test_ray_chooses_no_number_of_threads(cluster: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Else torch would add in another order than in a process of this machine."""
    monkeypatch.delenv("OMP_NUM_THREADS", raising=False)
    words = {"variable": "OMP_NUM_THREADS"}
    items = [Item(str(i), f"{WORK}setting", words) for i in range(6)]
    known = by_name(run(items, open_executor("ray", cluster)))
    # More items than workers: a worker is as it was after its first.
    assert [answer.value[0] for answer in known.values()] == [""] * 6
    assert len({answer.place.fingerprint for answer in known.values()}) == 1


def test_ray_says_who_is_at_what_and_who_at_nothing(cluster: str) -> None:
    engine = open_executor("ray", cluster)
    assert isinstance(engine, RayExecutor)
    try:
        [future] = engine.start([Item("wait", f"{WORK}wait", {"seconds": 0.5})])
        while not (running := engine.running()):
            # It is not asked more often than somebody would look.
            engine._seen = 0.0, {}
        assert [name for name, _ in running.values()] == ["wait"]
        assert future.result().state is State.DONE
        # The worker has not been given anything since, and did not say that it ended.
        assert not engine.running()
    finally:
        engine.close()


def test_an_item_that_another_worker_takes_is_at_that_one_alone() -> None:
    starts = Starts()
    assert [starts.began(*at) for at in (("a", "1"), ("b", "2"), ("a", "3"))] == [1, 1, 2]
    assert {worker: item for worker, (item, _) in starts.running().items()} == {"2": "b", "3": "a"}


def test_what_no_node_can_hold_is_not_run_and_says_so(cluster: str) -> None:
    items = [
        Item("wide", f"{WORK}double", {"number": 1}, Needs(cpus=999)),
        Item("of a class", f"{WORK}double", {"number": 1}, Needs(gpus=1, device="H100")),
    ]
    known = by_name(run(items, open_executor("ray", cluster)))
    assert {answer.state for answer in known.values()} == {State.NOT_RUN}
    assert "999 processors" in known["wide"].reason
    assert "no device: the cluster has none with 1 H100" in known["of a class"].reason


def test_ray_is_told_what_an_item_needs() -> None:
    needs = Needs(2, 1, 2**30, "H100", 1, {"XLA_FLAGS": "--x"})
    told = options(Item("x", "y:z", needs=needs))
    assert (told["num_cpus"], told["num_gpus"], told["memory"]) == (2, 1, 2**30)
    assert told["accelerator_type"] == "H100"
    assert told["max_retries"] == 2 and not told["retry_exceptions"]
    variables = told["runtime_env"]["env_vars"]
    assert variables["XLA_FLAGS"] == "--x"
    # A worker with another number of threads is another worker.
    assert len(variables) == 2


def test_a_cluster_that_is_not_there_is_named() -> None:
    with pytest.raises(ItemError, match="expected a Ray cluster at"):
        open_executor("ray", "127.0.0.1:1")


EXAMPLE = ROOT / "docs/examples/ray-cluster.yaml"


def parsed(command: str) -> str:
    """Return the subcommand of a line of the example, with every option known to its program."""
    from ray.scripts.scripts import cli as ray

    words = shlex.split(command)
    while "=" in words[0]:
        words.pop(0)
    program = {"ray": ray, "megalodon-numerics": main}[words[0].rpartition("/")[2]]
    name, *rest = words[1:]
    program.commands[name].make_context(name, rest)
    return name


def test_the_commands_of_the_example_are_what_the_programs_take() -> None:
    text = EXAMPLE.read_text("utf-8")
    config = yaml.safe_load(text)
    heads, workers = (config[f"{who}_start_ray_commands"] for who in ("head", "worker"))
    assert [parsed(line) for line in (*heads, *workers)] == ["stop", "start"] * 2
    [night] = re.findall(r'^# +ray exec .*"cd megalodon-numerics && (.*)"$', text, re.MULTILINE)
    assert parsed(night) == "nightly"
    with pytest.raises(NoSuchOption):
        parsed(f"{heads[1]} --no-such-option")
    # What is installed there is here: the constraints, and the extras by their names.
    [setup] = config["setup_commands"]
    extras = re.findall(r"-e '\.\[(.*)\]'", setup)[0].split(",")
    project = tomllib.loads((ROOT / "pyproject.toml").read_text("utf-8"))["project"]
    assert set(extras) <= project["optional-dependencies"].keys()
    assert (ROOT / re.findall(r"-c (\S+)", setup)[0]).is_file()


@pytest.mark.parametrize("mistaken", ["", "setup_command", "ssh_user"])
def test_the_example_of_a_cluster_is_what_rays_launcher_takes(mistaken: str) -> None:
    """By Ray's own schema, after Ray's own completion: the launcher itself needs machines."""
    from ray.autoscaler._private.util import prepare_config, validate_config

    config = yaml.safe_load(EXAMPLE.read_text("utf-8"))
    if not mistaken:
        validate_config(prepare_config(config))
        return
    with pytest.raises(jsonschema.ValidationError, match=mistaken):
        validate_config(prepare_config({**config, mistaken: ["what the schema does not know"]}))
