"""The response that every rank computes from the requests of all ranks, without processes."""

from hypothesis import given
from hypothesis import strategies as st

from dualdist.collectives.negotiation import CollectiveRequest, JoinedAt, RankRequests, Response, compute_response

NAMES = st.sampled_from(["a", "b", "c", "d"])
ROWS = st.lists(
    st.builds(
        lambda names, waits, joined: (
            RankRequests((), "", JoinedAt(1, 2, 3.0, 4)) if joined else row(*names, waiting=waits)
        ),
        st.lists(NAMES, unique=True),
        st.booleans(),
        st.booleans(),
    ),
    min_size=1,
    max_size=4,
)


def request(name: str, kind: str = "allreduce", **terms: object) -> CollectiveRequest:
    return CollectiveRequest(kind, name, {"tensors": ["float32(2,)"], **terms})


def row(*names: str, waiting: bool | str = False) -> RankRequests:
    """Return the requests of a rank for reductions of these names, blocked on the last one or on a given one."""
    name = waiting if isinstance(waiting, str) else names[-1] if waiting and names else ""
    return RankRequests(tuple(request(name) for name in names), name)


def joined(exchanges: int, rounds: int = 0, clock_s: float = 0.0) -> RankRequests:
    return RankRequests(joined=JoinedAt(exchanges, rounds, clock_s, num_unnamed=7))


@given(ROWS)
def test_only_what_all_active_ranks_request_is_agreed_and_only_what_can_never_be_is_refused(
    rows: list[RankRequests],
) -> None:
    decision = compute_response(rows, range(len(rows)))
    active = [one for one in rows if one.joined is None]
    everywhere = set.intersection(*[{o.name for o in one.requests} for one in active]) if active else set()
    assert set(decision.agreed) == everywhere
    assert (decision.last_joined is not None) == (not active)
    if decision.refused:
        assert all(one.waiting for one in active), "some rank may still begin what the others wait for"
        assert {name for name, _ in decision.refused} == {one.waiting for one in active}
    elif active and not decision.agreed:
        assert not all(one.waiting for one in active), "nobody would ever go on"
    for one in rows:
        assert RankRequests.loads(one.dumps()) == one


def test_the_first_active_rank_gives_the_order_and_the_last_to_join_took_part_most() -> None:
    rows = [joined(1), row("b", "a", "c"), row("a", "c", "b")]
    assert compute_response(rows, range(3)) == Response(agreed=("b", "a", "c"))
    assert compute_response([row("a", waiting=True), row("b")], range(2)) == Response()
    assert compute_response([joined(5), joined(4)], range(2)).last_joined == 0
    assert compute_response([joined(4, rounds=9), joined(4, rounds=8)], range(2)).last_joined == 0
    assert compute_response([joined(4, 8, clock_s=2.0), joined(4, 8, clock_s=1.0)], range(2)).last_joined == 0
    assert compute_response([joined(4), joined(4)], (3, 7)).last_joined == 7


def test_a_refusal_lists_the_arguments_of_each_rank_but_no_long_lists() -> None:
    odd = RankRequests((request("x", op="max"),), "x")
    rows = [RankRequests((request("x", op="sum"),), "x")] * 2 + [odd]
    (name, reason), *others = compute_response(rows, (3, 5, 6)).refused
    assert (name, others) == ("x", [])
    assert "ranks 3, 5 allreduce of float32(2,), op sum" in reason
    assert "rank 6 allreduce of float32(2,), op max" in reason
    many = CollectiveRequest("grouped_allreduce", "x", {"tensors": ["float32(2,)"] * 20, "op": "sum"})
    assert str(many).endswith("and 12 more")
    few = [RankRequests((request("x", op="sum"),))] * 12 + [RankRequests((request("x", op="max"),))]
    assert "and 4 more" in compute_response(few, range(13)).refused[0][1]


def test_what_ranks_begin_on_different_sides_of_a_backward_is_refused() -> None:
    """On a device they would pair it with a bucket of gradients: Note [one order on a device] in backends/native."""
    early, late = (RankRequests((request("x"), request("y")), begun=begun) for begun in (0, 12))
    assert [RankRequests.loads(each.dumps()) for each in (early, late)] == [early, late]
    assert compute_response([late, late], range(2)) == Response(agreed=("x", "y"))
    refused = dict(compute_response([early, late], range(2)).refused)
    assert list(refused) == ["x", "y"]
    assert "rank 0 after 0 buckets of gradients; rank 1 after 12 buckets" in refused["x"]
