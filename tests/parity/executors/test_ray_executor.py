"""The same promises on a Ray cluster of three nodes, made here by Ray's own test cluster."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import jsonschema
import pytest
import yaml

from parity.executors.cluster import options
from parity.executors.item import Item, ItemError, Needs, State
from parity.executors.sweep import open_executor, run
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


@pytest.mark.parametrize("mistaken", ["", "setup_command", "ssh_user"])
def test_the_example_of_a_cluster_is_what_rays_launcher_takes(mistaken: str) -> None:
    """By Ray's own schema, after Ray's own completion: the launcher itself needs machines."""
    from ray.autoscaler._private.util import prepare_config, validate_config

    text = (Path(__file__).parents[3] / "docs/examples/ray-cluster.yaml").read_text("utf-8")
    config = yaml.safe_load(text)
    if not mistaken:
        validate_config(prepare_config(config))
        return
    with pytest.raises(jsonschema.ValidationError, match=mistaken):
        validate_config(prepare_config({**config, mistaken: ["what the schema does not know"]}))
