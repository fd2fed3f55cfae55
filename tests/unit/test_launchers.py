"""The exact command line of each launcher, and what is refused before anything starts."""

from __future__ import annotations

import subprocess
import sys
from dataclasses import replace

import pytest

from dualdist.errors import LaunchError, UsageError
from dualdist.launch import ssh
from dualdist.launch.execute import parse_mpi_version
from dualdist.launch.job import Host, Job, Mpi, RendezvousAddress, Site
from dualdist.launch.launchers import LAUNCHERS, build_command, build_commands
from dualdist.launch.launchers.horovodrun import localhost_spellings

TOOLS = {name: f"/v/bin/{name}" for name in ("torchrun", "horovodrun", "mpirun", "srun")}
JOB = Job(("train.py", "--epochs", "1"), 2, "native", env={"OMP_NUM_THREADS": "1"})
VARIABLES = {"OMP_NUM_THREADS": "1", "DUALDIST_BACKEND": "native"}


def site(mpi: Mpi = "openmpi4", *, is_root: bool = False) -> Site:
    return Site("/v/bin/python", TOOLS, "/v/bin:/bin", mpi, is_root=is_root)


GOLDEN = [
    ("torchrun", site(), "/v/bin/torchrun --standalone --local-addr=127.0.0.1 --nproc-per-node=2"),
    ("horovodrun", site(), "/v/bin/horovodrun --gloo -np 2 /v/bin/python"),
    ("horovodrun-mpi", site(), "/v/bin/horovodrun --mpi -np 2 /v/bin/python"),
    (
        "mpirun",
        site(),
        "/v/bin/mpirun --oversubscribe --bind-to none -np 2 -x OMP_NUM_THREADS -x DUALDIST_BACKEND /v/bin/python",
    ),
    (
        "mpirun",
        site("openmpi5", is_root=True),
        "/v/bin/mpirun --allow-run-as-root --map-by :OVERSUBSCRIBE --bind-to none -np 2 "
        "-x OMP_NUM_THREADS -x DUALDIST_BACKEND /v/bin/python",
    ),
    (
        "mpirun",
        site("mpich", is_root=True),
        "/v/bin/mpirun -np 2 -genvlist OMP_NUM_THREADS,DUALDIST_BACKEND /v/bin/python",
    ),
    ("srun", site(), "/v/bin/srun --kill-on-bad-exit=1 --nodes=1 --ntasks=2 /v/bin/python"),
]
# The launchers whose jobs on one host are one command.
ALONE = [name for name in LAUNCHERS if name not in ("python", "spawn")]


@pytest.mark.parametrize(("launcher", "where", "line"), GOLDEN, ids=[f"{name}-{at.mpi}" for name, at, _ in GOLDEN])
def test_command_line_is_what_a_person_would_type(launcher: str, where: Site, line: str) -> None:
    assert build_command(launcher, JOB, where).argv == (*line.split(), "train.py", "--epochs", "1")


def test_every_launcher_of_one_command_has_a_golden_line() -> None:
    assert {name for name, _, _ in GOLDEN} == set(ALONE)


@pytest.mark.parametrize("launcher", ALONE)
def test_every_launcher_hands_the_variables_over(launcher: str) -> None:
    env = dict(build_command(launcher, JOB, site()).env)
    path = env.pop("PATH", None)
    assert env == VARIABLES
    assert path == ("/v/bin:/bin" if launcher.startswith("horovodrun") else None)


def test_plain_python_is_the_program_alone() -> None:
    built = build_command("python", Job(("-m", "package.module", "x"), 1), site())
    assert built.argv == ("/v/bin/python", "-m", "package.module", "x")
    assert built.env == {}


def test_plain_python_starts_one_rank_only() -> None:
    with pytest.raises(LaunchError, match=r"starts 1 rank, not 2"):
        build_command("python", JOB, site())


def test_transport_travels_beside_the_backend() -> None:
    job = Job(("train.py",), 2, "horovod", "mpi")
    assert build_command("mpirun", job, site()).env == {"DUALDIST_BACKEND": "horovod", "DUALDIST_TRANSPORT": "mpi"}


def test_srun_starts_mpi_where_mpi_is_the_transport() -> None:
    argv = build_command("srun", Job(("train.py",), 2, "horovod", "mpi"), site()).argv
    assert argv[4:6] == ("--mpi=pmix", "/v/bin/python")


def test_srun_gives_a_rank_the_cores_of_a_task() -> None:
    """By default srun gives one, whatever the allocation has."""
    argv = build_command("srun", JOB, replace(site(), task_cpus=8)).argv
    assert argv[2:5] == ("--nodes=1", "--ntasks=2", "--cpus-per-task=8")


@pytest.mark.parametrize(("launcher", "helped"), [("mpirun", True), ("horovodrun-mpi", True), ("horovodrun", False)])
def test_open_mpi_starts_on_one_host_without_ssh(launcher: str, helped: bool) -> None:
    """By default it fails with 'plm_rsh_agent: ssh : rsh ... could not be found'."""
    assert "OMPI_MCA_plm_rsh_agent" not in build_command(launcher, JOB, site()).env
    without = replace(site(), has_ssh=False)
    assert build_command(launcher, JOB, without).env.get("OMPI_MCA_plm_rsh_agent") == ("false" if helped else None)


def test_horovodrun_over_open_mpi_5_is_refused_with_a_way_out() -> None:
    with pytest.raises(LaunchError, match=r"Open MPI 5.*start the job with mpirun itself"):
        build_command("horovodrun-mpi", JOB, site("openmpi5"))


def test_mpirun_of_unknown_make_is_refused() -> None:
    with pytest.raises(LaunchError, match=r"/v/bin/mpirun belongs to neither"):
        build_command("mpirun", JOB, site("unknown"))


@pytest.mark.parametrize("launcher", ALONE)
def test_missing_tool_is_named_with_its_install_hint(launcher: str) -> None:
    tool = launcher.removesuffix("-mpi")
    with pytest.raises(LaunchError, match=r"was not found beside /v/bin/python or on PATH; it comes with"):
        build_command(launcher, JOB, Site("/v/bin/python", {name: TOOLS[name] for name in TOOLS if name != tool}, ""))


def test_unknown_launcher_is_refused_with_the_nearest() -> None:
    with pytest.raises(UsageError, match=r"launcher 'mpiruns'.*did you mean 'mpirun'\?"):
        build_command("mpiruns", JOB, site())


@pytest.mark.parametrize(("program", "ranks", "wrong"), [((), 2, "needs a program"), (("a.py",), 0, "ranks=0")])
def test_impossible_job_is_refused(program: tuple[str, ...], ranks: int, wrong: str) -> None:
    with pytest.raises(UsageError, match=wrong):
        Job(program, ranks)


@pytest.mark.parametrize(
    ("version", "mpi"),
    [
        ("mpirun (Open MPI) 4.1.8\n\nReport bugs to http://www.open-mpi.org/community/help/\n", "openmpi4"),
        ("mpirun (Open MPI) 3.1.6\n", "openmpi4"),
        ("mpirun (Open MPI) 5.0.11\n", "openmpi5"),
        ("mpirun (Open MPI) 10.0.0rc1\n", "openmpi5"),
        ("HYDRA build details:\n    Version:                                 4.0.2\n", "mpich"),
        ("Intel(R) MPI Library for Linux* OS, Version 2021.9 Build 20230307\n", "mpich"),
        ("mpirun: a script of this site\n", "unknown"),
        ("", "unknown"),
    ],
)
def test_mpi_is_recognised_by_its_version(version: str, mpi: Mpi) -> None:
    assert parse_mpi_version(version) == mpi


def test_command_lines_need_no_torch() -> None:
    program = (
        "import sys; import dualdist.launch.launchers.mpirun, dualdist.launch.execute; sys.exit('torch' in sys.modules)"
    )
    assert subprocess.run([sys.executable, "-c", program], timeout=60).returncode == 0


HOSTS = (Host("a", 2, is_local=True), Host("b", 2))
ON_HOSTS = Job(("train.py",), 3, "native", hosts=HOSTS, interface="eth0")
FORWARDED = "-x DUALDIST_BACKEND /v/bin/python train.py"
MCA = "--mca btl_tcp_if_include eth0"
GOLDEN_HOSTS = [
    (
        "mpirun",
        "openmpi4",
        False,
        "/v/bin/mpirun --oversubscribe --map-by slot --bind-to none -np 3 -H a:2,b:2 "
        f"{MCA} --mca oob_tcp_if_include eth0 {FORWARDED}",
    ),
    (
        "mpirun",
        "openmpi4",
        True,
        "/v/bin/mpirun --allow-run-as-root --oversubscribe --map-by slot --bind-to none -np 3 -H a:2,b:2 "
        f"{MCA} --mca oob_tcp_if_include eth0 {FORWARDED}",
    ),
    (
        "mpirun",
        "openmpi5",
        True,
        "/v/bin/mpirun --allow-run-as-root --map-by slot:OVERSUBSCRIBE --bind-to none -np 3 -H a:2,b:2 "
        f"{MCA} --prtemca prte_if_include eth0 {FORWARDED}",
    ),
    (
        "mpirun",
        "mpich",
        True,
        "/v/bin/mpirun -np 3 -hosts a:2,b:2 -iface eth0 -genvlist DUALDIST_BACKEND /v/bin/python train.py",
    ),
    (
        "horovodrun",
        "openmpi4",
        True,
        "/v/bin/horovodrun --gloo -np 3 -H a:2,b:2 --disable-cache --network-interfaces eth0 /v/bin/python train.py",
    ),
    (
        "srun",
        "openmpi4",
        True,
        "/v/bin/srun --kill-on-bad-exit=1 --distribution=arbitrary --nodelist=a,a,b --ntasks=3 /v/bin/python train.py",
    ),
]


@pytest.mark.parametrize(
    ("launcher", "mpi", "is_root", "line"),
    GOLDEN_HOSTS,
    ids=[f"{row[0]}-{row[1]}-root={row[2]}" for row in GOLDEN_HOSTS],
)
def test_command_line_on_hosts_is_what_a_person_would_type(launcher: str, mpi: Mpi, is_root: bool, line: str) -> None:
    assert " ".join(build_command(launcher, ON_HOSTS, site(mpi, is_root=is_root)).argv) == line


def test_horovodrun_is_given_no_folder_that_it_does_not_quote() -> None:
    """It passes the folder to the shells of other hosts."""
    here = Job(("train.py",), 2)
    for folder in ("/my work", "/$(id)", "/it's"):
        odd = replace(site(), folder=folder)
        with pytest.raises(LaunchError, match="start the job in a folder whose name has no blanks"):
            build_command("horovodrun", ON_HOSTS, odd)
        assert build_command("horovodrun", here, odd)


def test_horovodruns_mpirun_gets_the_prefix_of_its_daemon() -> None:
    argv = build_command("horovodrun-mpi", ON_HOSTS, site()).argv
    assert argv[1:7] == ("--mpi", "-np", "3", "--mpi-args=--prefix /v", "-H", "a:2,b:2")


def test_mpiruns_own_host_need_not_have_the_ranks_interface() -> None:
    away = Job(("train.py",), 2, hosts=(Host("b", 1), Host("c", 1)), interface="eth0")
    argv = build_command("mpirun", away, site()).argv
    assert "btl_tcp_if_include" in argv
    assert "oob_tcp_if_include" not in argv


def met() -> Site:
    return Site(
        "/v/bin/python", TOOLS, "/v/bin", folder="/home/me/my work", rendezvous=RendezvousAddress("10.0.0.1", 4711)
    )


def test_torchrun_has_an_agent_on_each_host_and_ranks_follow_the_hosts() -> None:
    here, there = build_commands("torchrun", ON_HOSTS, met())
    flags = "--nnodes=2 --node-rank={} --nproc-per-node={} --master-addr=10.0.0.1 --master-port=4711 train.py"
    assert (here.host, there.host) == (None, "b")
    assert here.argv == ("/v/bin/torchrun", *flags.format(0, 2).split())
    assert there.argv == ("/v/bin/torchrun", *flags.format(1, 1).split())


def test_commands_for_other_hosts_go_over_ssh_with_folder_and_variables() -> None:
    _, there = build_commands("torchrun", ON_HOSTS, met())
    over = ssh.wrap_in_ssh(there, met())
    assert over.host is None
    assert over.argv[0] == "ssh"
    assert "BatchMode=yes" in over.argv
    assert over.argv[-2] == "b"
    assert over.argv[-1].startswith(
        "cd '/home/me/my work' && exec env DUALDIST_BACKEND=native /v/bin/python -m dualdist.launch.remote_guard "
        "/v/bin/torchrun --nnodes=2 "
    )


def test_spawn_gives_every_rank_its_topology() -> None:
    built = build_commands("spawn", ON_HOSTS, met())
    names = ("RANK", "SIZE", "LOCAL_RANK", "LOCAL_SIZE", "NODE_RANK", "NUM_NODES")
    places = [tuple(int(command.env[f"DUALDIST_{name}"]) for name in names) for command in built]
    assert places == [(0, 3, 0, 2, 0, 2), (1, 3, 1, 2, 0, 2), (2, 3, 0, 1, 1, 2)]
    assert [command.host for command in built] == [None, None, "b"]


def test_srun_leaves_the_nodes_to_slurm_where_asked_to() -> None:
    assert "--nodes=1" not in build_command("srun", Job(("train.py",), 2, nodes=None), site()).argv


def test_torchrun_restarts_its_ranks_itself() -> None:
    assert "--max-restarts=2" in build_command("torchrun", Job(("train.py",), 2, max_restarts=2), site()).argv


def test_horovodrun_keeps_ranks_on_hosts_of_their_own_names() -> None:
    """It excludes the host of a lost rank, and waits for a second host to find an interface."""
    here = build_command("horovodrun", Job(("train.py",), 3, min_ranks=2), site()).argv
    hosts = "localhost:1,Localhost:1,lOcalhost:1"
    elastic = "--min-np 2 --max-np 3 --blacklist-cooldown-range 1 60"
    assert " ".join(here) == (
        f"/v/bin/horovodrun --gloo -np 3 {elastic} -H {hosts} --network-interfaces lo /v/bin/python train.py"
    )
    there = build_command("horovodrun", Job(("train.py",), 3, hosts=HOSTS, interface="eth0", min_ranks=1), site()).argv
    elastic = "--min-np 1 --max-np 3 --blacklist-cooldown-range 1 60"
    assert " ".join(there) == (
        f"/v/bin/horovodrun --gloo -np 3 {elastic} --network-interfaces eth0 -H a:2,b:2 --disable-cache "
        "/v/bin/python train.py"
    )


@pytest.mark.parametrize("min_ranks", [0, 3])
def test_impossible_numbers_of_ranks_to_keep_are_refused(min_ranks: int) -> None:
    with pytest.raises(UsageError, match=f"min_ranks={min_ranks}: expected 1 to 2, the number of ranks"):
        Job(("train.py",), 2, min_ranks=min_ranks)


def test_names_of_this_host_are_different_and_come_to_an_end() -> None:
    names = localhost_spellings(512)
    assert len({*names}) == 512
    assert {name.lower() for name in names} == {"localhost"}
    with pytest.raises(LaunchError, match="513 ranks on this host"):
        localhost_spellings(513)


def test_more_ranks_than_slots_are_refused() -> None:
    with pytest.raises(UsageError, match=r"5 ranks on hosts with 4 slots \(a:2,b:2\)"):
        Job(("train.py",), 5, hosts=HOSTS)
