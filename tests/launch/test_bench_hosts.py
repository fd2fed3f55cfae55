"""`dualdist compare` and `bench` over several hosts: of -H, of a PBS node file, and of a Slurm allocation."""

import json
import sys
from collections.abc import Mapping
from typing import Any

from harness.hosts import Hosts
from harness.jobs import Launch
from harness.slurm import Slurm
from launch.running import RUN

from dualdist.utils import saved_choices
from dualdist.utils.saved_choices import ChoiceConditions, SavedChoice

DUALDIST = (sys.executable, "-m", "dualdist")
SHORT = ("--model", "mlp", "--steps", "3", "--warmup", "1", "--rounds", "1", "--device", "cpu", "--json", "kept.json")
COMPARE = (*DUALDIST, "compare", *SHORT, "--baselines", "one")
ALLREDUCE = ("bench", "allreduce", "--sizes", "8", "--rounds", "2", "--block-s", "0.005", "--dtype", "float32")


def kept(launch: Launch) -> dict[str, Any]:
    found: dict[str, Any] = json.loads((launch.directory / "kept.json").read_text())
    return found


def hosts_of(found: Mapping[str, Any]) -> dict[str, list[int]]:
    """Return the node of each rank, by the label of the launch; every launch went well."""
    assert [job["error"] for job in found["jobs"]] == [None] * len(found["jobs"])
    return {job["label"]: [rank["node_rank"] for rank in job["ranks"]] for job in found["jobs"]}


def test_contenders_are_compared_on_two_hosts(launch: Launch, two_hosts: Hosts) -> None:
    """mpirun finds the network that connects them."""
    words = ("-H", "hosta:1,hostb:1", "--backends", "native,mpi", "--transports", "gloo,mpi")
    launch(two_hosts.on(0, *COMPARE, *words), env=two_hosts.env, timeout_s=280)
    found = kept(launch)
    both = [0, 1]
    assert hosts_of(found) == {"native over gloo (torchrun)": both, "mpi (mpirun)": both, "one rank": [0]}
    assert found["settings"]["hosts"] == "hosta:1,hostb:1"
    assert found["results"]["equivalence"]["criterion"] == "bit-identical"
    assert found["results"]["equivalence"]["mismatches"] == {}


def test_allreduce_is_timed_on_the_hosts_of_a_pbs_job(launch: Launch, two_hosts: Hosts) -> None:
    nodes = {"PBS_JOBID": "7.pbs", "PBS_NODEFILE": launch.write("nodes", "hosta\nhostb\n")}
    words = (*ALLREDUCE, "--backend", "native:gloo", "--json", "kept.json")
    launch(two_hosts.on(0, *DUALDIST, *words), env={**two_hosts.env, **nodes}, timeout_s=280)
    (result,) = kept(launch)["results"]
    assert (result["ranks"], result["num_nodes"], result["launcher"]) == (2, 2, "torchrun")
    assert kept(launch)["settings"]["hosts"] == "hosta:1,hostb:1"


def test_contenders_are_compared_on_the_nodes_of_a_slurm_allocation(launch: Launch, slurm: Slurm) -> None:
    """Each launch has the ranks of the allocation on its nodes, though srun alone would place others otherwise."""
    words = ("--backends", "native", "--transports", "gloo", "-np", "4")
    argv = [*slurm.salloc("-N2", "-n4"), *COMPARE, *words]
    launch(argv, env=slurm.env, timeout_s=280)
    assert hosts_of(kept(launch)) == {"native over gloo (srun)": [0, 0, 0, 1], "one rank": [0]}


def test_a_folder_that_hosts_do_not_share_and_a_host_that_is_not_there_are_refused(
    launch: Launch, two_hosts: Hosts
) -> None:
    """A folder that each of them has, and of which only this one has the files."""
    hidden = launch.directory / "hidden"
    hidden.mkdir()
    script = f'mount -t tmpfs none {hidden} && cd {hidden} && exec "$@"'
    argv = ["unshare", "--mount", "sh", "-c", script, "sh", *COMPARE, "-H", "hosta:1,hostb:1"]
    outcome = launch(two_hosts.on(0, *argv), env=two_hosts.env, check=False)
    assert f"host 'hostb' does not see {hidden}, where the ranks leave their reports" in outcome.stderr, str(outcome)
    outcome = launch(two_hosts.on(0, *COMPARE, "-H", "hosta:1,nowhere:1"), env=two_hosts.env, check=False)
    assert "host 'nowhere' cannot be reached by ssh: its name does not resolve" in outcome.stderr, str(outcome)


TELL = "import dualdist as dd\ndd.init()\nprint(dd.rank(), dd.backend(), dd.transport(), flush=True)\ndd.shutdown()\n"


def test_a_choice_saved_for_two_hosts_is_taken_on_two_hosts_alone(launch: Launch, two_hosts: Hosts) -> None:
    here = ChoiceConditions.here("cpu", "torchrun", 2, threads=1, mpi=False, local_ranks=1)
    env = {**two_hosts.env, "XDG_CONFIG_HOME": str(launch.directory), "OMP_NUM_THREADS": "1"}
    choice = SavedChoice(here, "horovod", "gloo", "2026-01-01", "1.31x faster than another")
    saved_choices.save_choices(saved_choices.choices_path(env), [choice])
    program = launch.write("tell.py", TELL)
    for hosts, expected in (("hosta:1,hostb:1", "horovod gloo"), ("hosta:2", "native shm")):
        words = ("-H", hosts, "--launcher", "torchrun", "--env", "XDG_CONFIG_HOME", program)
        printed = launch(two_hosts.on(0, *RUN, *words), env=env).stdout
        assert sorted(printed.splitlines()) == [f"{rank} {expected}" for rank in range(2)]
