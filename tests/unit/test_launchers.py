"""The exact command line of each launcher, and what is refused before anything starts."""

import shlex
from dataclasses import replace
from typing import Any

import pytest

from dualdist.errors import LaunchError, UsageError
from dualdist.launch import ssh
from dualdist.launch.execute import parse_mpi_version
from dualdist.launch.job import Host, Job, Mpi, RendezvousAddress, Site
from dualdist.launch.launchers import LAUNCHERS, PROGRAMS, build_command, build_commands
from dualdist.launch.launchers.horovodrun import localhost_spellings

TOOLS = {name: f"/v/bin/{name}" for name in PROGRAMS}
HOSTS = (Host("a", 2, is_local=True), Host("b", 2))
TRAIN = ("train.py",)
JOB = Job(TRAIN, 2, "native", env={"OMP_NUM_THREADS": "1"})
ON_HOSTS = Job(TRAIN, 3, "native", hosts=HOSTS, interface="eth0")


def site(mpi: Mpi = "openmpi4", **changes: Any) -> Site:
    return replace(Site("/v/bin/python", TOOLS, "/v/bin:/bin", mpi), **changes)


MET = site(folder="/home/me/my work", rendezvous=RendezvousAddress("10.0.0.1", 4711))
X = "-x OMP_NUM_THREADS -x DUALDIST_BACKEND"
ON_A_AND_B = "-H a:2,b:2 --mca btl_tcp_if_include eth0"
ELASTIC = "--max-np 3 --blacklist-cooldown-range 1 60"
GOLDEN = [
    ("torchrun", JOB, site(), "torchrun --standalone --local-addr=127.0.0.1 --nproc-per-node=2 train.py"),
    ("torchrun", Job(("train.py", "--n", "3"), 2), site(),
     "torchrun --standalone --local-addr=127.0.0.1 --nproc-per-node=2 -- train.py --n 3"),
    ("torchrun", Job(("-m", "package", "--n", "3"), 2), site(),
     "torchrun --standalone --local-addr=127.0.0.1 --nproc-per-node=2 -m -- package --n 3"),
    ("horovodrun", JOB, site(), "horovodrun --gloo -np 2 python train.py"),
    ("horovodrun-mpi", JOB, site(), "horovodrun --mpi -np 2 python train.py"),
    ("mpirun", JOB, site(), f"mpirun --oversubscribe --bind-to none -np 2 {X} python train.py"),
    ("mpirun", JOB, site("openmpi5", is_root=True),
     f"mpirun --allow-run-as-root --map-by :OVERSUBSCRIBE --bind-to none -np 2 {X} python train.py"),
    ("mpirun", JOB, site("mpich", is_root=True),
     "mpirun -np 2 -genvlist OMP_NUM_THREADS,DUALDIST_BACKEND python train.py"),
    ("srun", JOB, site(), "srun --kill-on-bad-exit=1 --nodes=1 --ntasks=2 python train.py"),
    ("srun", Job(TRAIN, 2, nodes=None), site(), "srun --kill-on-bad-exit=1 --ntasks=2 python train.py"),
    ("srun", Job(TRAIN, 2, "horovod", "mpi"), site(),
     "srun --kill-on-bad-exit=1 --nodes=1 --ntasks=2 --mpi=pmix python train.py"),
    ("srun", JOB, site(task_cpus=8),  # by default srun gives a rank one core, whatever the allocation has
     "srun --kill-on-bad-exit=1 --nodes=1 --ntasks=2 --cpus-per-task=8 python train.py"),
    ("python", Job(("-m", "package.module", "x"), 1), site(), "python -m package.module x"),
    ("mpirun", ON_HOSTS, site(), f"mpirun --oversubscribe --map-by slot --bind-to none -np 3 {ON_A_AND_B} "
     "--mca oob_tcp_if_include eth0 -x DUALDIST_BACKEND python train.py"),
    ("mpirun", ON_HOSTS, site("openmpi5", is_root=True), "mpirun --allow-run-as-root --map-by slot:OVERSUBSCRIBE "
     f"--bind-to none -np 3 {ON_A_AND_B} --prtemca prte_if_include eth0 -x DUALDIST_BACKEND python train.py"),
    ("mpirun", ON_HOSTS, site("mpich"),
     "mpirun -np 3 -hosts a:2,b:2 -iface eth0 -genvlist DUALDIST_BACKEND python train.py"),
    # The host where mpirun itself runs need not have the ranks' interface.
    ("mpirun", Job(TRAIN, 2, hosts=(Host("b", 1), Host("c", 1)), interface="eth0"), site(), "mpirun --oversubscribe "
     "--map-by slot --bind-to none -np 2 -H b:1,c:1 --mca btl_tcp_if_include eth0 python train.py"),
    ("horovodrun", ON_HOSTS, site(),
     "horovodrun --gloo -np 3 -H a:2,b:2 --disable-cache --network-interfaces eth0 python train.py"),
    ("horovodrun-mpi", Job(TRAIN, 3, hosts=HOSTS), site(), "horovodrun --mpi -np 3 '--mpi-args=--prefix /v' -H a:2,b:2 "
     "--disable-cache python train.py"),
    # Elastic horovodrun excludes the host of a lost rank, and waits for a second host to find an interface.
    ("horovodrun", Job(TRAIN, 3, min_ranks=2), site(), f"horovodrun --gloo -np 3 --min-np 2 {ELASTIC} "
     "-H localhost:1,Localhost:1,lOcalhost:1 --network-interfaces lo python train.py"),
    ("horovodrun", Job(TRAIN, 3, hosts=HOSTS, interface="eth0", min_ranks=1), site(), "horovodrun --gloo -np 3 "
     f"--min-np 1 {ELASTIC} --network-interfaces eth0 -H a:2,b:2 --disable-cache python train.py"),
    ("srun", ON_HOSTS, site(), "srun --kill-on-bad-exit=1 --distribution=arbitrary --nodelist=a,a,b --ntasks=3 "
     "python train.py"),
]  # fmt: skip
# The launchers whose jobs on one host are one command.
ALONE = [name for name in LAUNCHERS if name not in ("python", "spawn")]


@pytest.mark.parametrize(("launcher", "job", "where", "line"), GOLDEN, ids=[row[3][:60] for row in GOLDEN])
def test_command_line_is_what_a_person_would_type(launcher: str, job: Job, where: Site, line: str) -> None:
    shown = shlex.join(build_command(launcher, job, where).argv)
    assert shown.startswith("/v/bin/")
    assert shown.replace("/v/bin/", "") == line


def test_every_launcher_has_golden_lines_and_this_host_as_many_names_as_ranks() -> None:
    assert {name for name, *_ in GOLDEN} == {*ALONE, "python"}
    names = localhost_spellings(512)
    assert len({*names}) == 512
    assert {name.lower() for name in names} == {"localhost"}
    with pytest.raises(LaunchError, match="513 ranks on this host"):
        localhost_spellings(513)


@pytest.mark.parametrize("launcher", ALONE)
def test_every_launcher_passes_the_variables_on(launcher: str) -> None:
    path = {"PATH": "/v/bin:/bin"} if launcher.startswith("horovodrun") else {}
    expected = {"OMP_NUM_THREADS": "1", "DUALDIST_BACKEND": "native"} | path
    assert build_command(launcher, JOB, site()).env == expected
    over = build_command(launcher, Job(TRAIN, 2, "horovod", "mpi"), site()).env
    assert over == {"DUALDIST_BACKEND": "horovod", "DUALDIST_TRANSPORT": "mpi"} | path


@pytest.mark.parametrize(("launcher", "helped"), [("mpirun", True), ("horovodrun-mpi", True), ("horovodrun", False)])
def test_open_mpi_starts_on_one_host_without_ssh(launcher: str, helped: bool) -> None:
    """By default it fails with 'plm_rsh_agent: ssh : rsh ... could not be found'."""
    assert "OMPI_MCA_plm_rsh_agent" not in build_command(launcher, JOB, site()).env
    found = build_command(launcher, JOB, site(has_ssh=False)).env.get("OMPI_MCA_plm_rsh_agent")
    assert found == ("false" if helped else None)


@pytest.mark.parametrize(
    ("launcher", "job", "where", "message"),
    [
        ("python", JOB, site(), "starts 1 rank on this host"),
        ("horovodrun-mpi", JOB, site("openmpi5"), r"Open MPI 5.*start the job with mpirun itself"),
        ("mpirun", JOB, site("unknown"), r"/v/bin/mpirun belongs to neither"),
        ("mpirun", Job(TRAIN, 2, hosts=(Host("fd00::1", 2),)), site(), r"host \[fd00::1\]:2: mpirun takes no address"),
        ("mpiruns", JOB, site(), r"launcher 'mpiruns'.*did you mean 'mpirun'\?"),
        # horovodrun passes the folder to the shells of other hosts without quotes.
        *(("horovodrun", ON_HOSTS, site(folder=name), "start the job in a folder whose name has no blanks")
          for name in ("/my work", "/$(id)", "/it's")),
        *((name, JOB, site(tools={tool: TOOLS[tool] for tool in TOOLS if tool != name.removesuffix("-mpi")}),
           "was not found beside /v/bin/python or on PATH; it comes with") for name in ALONE),
    ],
)  # fmt: skip
def test_impossible_commands_are_refused_with_a_way_out(launcher: str, job: Job, where: Site, message: str) -> None:
    with pytest.raises(UsageError if launcher == "mpiruns" else LaunchError, match=message):
        build_command(launcher, job, where)
    assert launcher != "horovodrun" or job is JOB or build_command(launcher, Job(TRAIN, 2), where), "on one host"


@pytest.mark.parametrize(
    ("program", "ranks", "options", "message"),
    [
        ((), 2, {}, "needs a program"),
        (TRAIN, 0, {}, "ranks=0"),
        (TRAIN, 2, {"min_ranks": 0}, "min_ranks=0: expected 1 to 2, the number of ranks"),
        (TRAIN, 2, {"min_ranks": 3}, "min_ranks=3: expected 1 to 2, the number of ranks"),
        (TRAIN, 5, {"hosts": HOSTS}, r"5 ranks on hosts with 4 slots \(a:2,b:2\)"),
    ],
)
def test_impossible_jobs_are_refused(program: tuple[str, ...], ranks: int, options: Any, message: str) -> None:
    with pytest.raises(UsageError, match=message):
        Job(program, ranks, **options)


@pytest.mark.parametrize(
    ("version", "mpi"),
    [
        ("mpirun (Open MPI) 4.1.8\n\nReport bugs to http://www.open-mpi.org/community/help/\n", "openmpi4"),
        ("mpirun (Open MPI) 3.1.6\n", "openmpi4"),
        ("mpirun (Open MPI) 5.0.11\n", "openmpi5"),
        ("mpirun (Open MPI) 10.0.0rc1\n", "openmpi5"),
        ("HYDRA build details:\n    Version:                                 4.0.2\n", "mpich"),
        ("Intel(R) MPI Library for Linux* OS, Version 2021.9 Build 20230307\n", "mpich"),
        ("Open MPI v4.1.8, package: Open MPI user@localhost", "openmpi4"),
        ("Open MPI v5.0.11, package: Open MPI", "openmpi5"),
        ("Open MPI 4.1.8", "openmpi4"),
        ("MPICH Version:\t4.0.2\nMPICH Release date", "mpich"),
        ("Intel(R) MPI Library 2021.11 for Linux* OS", "mpich"),
        ("MVAPICH2 2.3.7", "mpich"),
        ("Fujitsu MPI Library 4.0.1", "unknown"),
        ("mpirun: a script of this site\n", "unknown"),
        ("", "unknown"),
    ],
)
def test_mpi_is_recognised_by_its_version(version: str, mpi: Mpi) -> None:
    assert parse_mpi_version(version) == mpi


def test_torchrun_has_an_agent_on_each_host_and_ranks_follow_the_hosts() -> None:
    here, there = build_commands("torchrun", ON_HOSTS, MET)
    flags = "--nnodes=2 --node-rank={} --nproc-per-node={} --master-addr=10.0.0.1 --master-port=4711 train.py"
    assert (here.host, there.host) == (None, "b")
    assert here.argv == ("/v/bin/torchrun", *flags.format(0, 2).split())
    assert there.argv == ("/v/bin/torchrun", *flags.format(1, 1).split())
    over = ssh.wrap_remote(there, MET)
    assert (over.host, over.argv[0], over.argv[-2], "BatchMode=yes" in over.argv) == (None, "ssh", "b", True)
    assert over.argv[-1].startswith(
        "cd '/home/me/my work' && exec env DUALDIST_BACKEND=native /v/bin/python -m dualdist.launch.ssh "
        "/v/bin/torchrun --nnodes=2 "
    )


def test_spawn_gives_every_rank_its_topology() -> None:
    built = build_commands("spawn", ON_HOSTS, MET)
    names = ("RANK", "SIZE", "LOCAL_RANK", "LOCAL_SIZE", "NODE_RANK", "NUM_NODES")
    places = [tuple(int(command.env[f"DUALDIST_{name}"]) for name in names) for command in built]
    assert places == [(0, 3, 0, 2, 0, 2), (1, 3, 1, 2, 0, 2), (2, 3, 0, 1, 1, 2)]
    assert [command.host for command in built] == [None, None, "b"]
