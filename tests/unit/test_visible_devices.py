"""What variables of vendors and schedulers show to a process: the values of their manuals."""

import pytest

from dualdist.environments.visible_devices import describe, hides_all, shown_devices

UUID = "8932f937-d72c-4106-c12f-20bd9faed9f6"
MIG, OTHER_MIG = "MIG-b7ba8b4a-5ad8-51cb-a85b-3ec26b0a1c4e", "MIG-6de3ee2d-8ab5-5b2c-b2c9-1c3ef0b6d44a"
OLD_MIG = f"MIG-GPU-{UUID}/1/0"
CUDA, HIP, ROCR, ZE = "CUDA_VISIBLE_DEVICES", "HIP_VISIBLE_DEVICES", "ROCR_VISIBLE_DEVICES", "ZE_AFFINITY_MASK"

CASES = [
    pytest.param({}, None, id="nothing restricts"),
    pytest.param({CUDA: "0"}, ("0",), id="one"),
    pytest.param({CUDA: "2,0, 1"}, ("2", "0", "1"), id="in another order"),
    pytest.param({CUDA: "0,1,-1,2"}, ("0", "1"), id="those before an invalid index"),
    pytest.param({CUDA: "0,1,1,2"}, ("0", "1"), id="those before one that is listed twice"),
    pytest.param({CUDA: ""}, (), id="none"),
    pytest.param({CUDA: "-1"}, (), id="none by a number"),
    pytest.param({CUDA: "NoDevFiles"}, (), id="Slurm's word for a task without GPUs"),
    pytest.param({CUDA: f"GPU-{UUID}"}, (f"GPU-{UUID}",), id="a UUID"),
    pytest.param({CUDA: "GPU-8932f937,GPU-7a9c3d10"}, ("GPU-8932f937", "GPU-7a9c3d10"), id="abbreviated UUIDs"),
    pytest.param({CUDA: MIG}, (MIG,), id="a MIG instance"),
    pytest.param({CUDA: f"{MIG},{OTHER_MIG}"}, (MIG,), id="of several MIG instances CUDA takes the first"),
    pytest.param({CUDA: OLD_MIG}, (OLD_MIG,), id="a MIG instance, as drivers before 470 name it"),
    pytest.param({ROCR: "0,GPU-DEADBEEFDEADBEEF"}, ("0", "GPU-DEADBEEFDEADBEEF"), id="ROCm's runtime"),
    pytest.param({HIP: "0,2"}, ("0", "2"), id="HIP"),
    pytest.param({HIP: "1", CUDA: "0,1"}, ("1",), id="HIP's goes before CUDA's"),
    pytest.param({ROCR: "4,5,6", HIP: "2,0"}, ("6", "4"), id="HIP counts what the runtime leaves"),
    pytest.param({ROCR: "4", HIP: "1"}, (), id="HIP's index is none of those"),
    pytest.param({ROCR: "3", CUDA: "0"}, ("3",), id="on ROCm by CUDA's name"),
    pytest.param({ZE: "0.0,0.1,1"}, ("0.0", "0.1", "1"), id="tiles and devices of Level Zero"),
    pytest.param({ZE: "0,0"}, ("0",), id="Level Zero, twice the same"),
    pytest.param({ZE: ""}, None, id="an empty mask restricts nothing"),
]


@pytest.mark.parametrize(("environ", "expected"), CASES)
def test_the_devices_that_variables_show(environ: dict[str, str], expected: tuple[str, ...] | None) -> None:
    assert shown_devices(environ | {"PATH": "/bin"}) == expected
    assert hides_all(environ) == (expected == ())


def test_messages_name_what_restricts() -> None:
    assert describe({"PATH": "/bin", ROCR: "0,1", CUDA: ""}) == f"{CUDA}= {ROCR}=0,1"
    assert describe({"PATH": "/bin"}) == ""
