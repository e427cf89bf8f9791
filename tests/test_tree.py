"""Tree search: right labels for every state on the way, each rollout searched once, chosen by the paper's rule."""

import math
import statistics

import pytest

from labeling.continuations import Continuation, Journal, Limits, Request, Runner, drive
from labeling.draws import MonteCarloConfig
from labeling.montecarlo import tree_labels
from labeling.tree import Node, Rollout, Tree, grown, same_start
from prm.env import replay
from prm.errors import UsageError
from prm.records import Step, StepLabel, Trajectory, read_jsonl
from tests.chain import Chain, LongChain, Walker, values, walks
from tests.test_montecarlo import Counting, key

pytestmark = pytest.mark.filterwarnings("ignore:.*rest on one distinct continuation")


def test_labels_are_unbiased_and_their_intervals_cover():
    by_tree, weighted, covered, examined = [], [], [], []
    for walker in (Walker(words=2), Walker(words=4), Walker(slip=0.25, again=0.2, fix=0.4, words=2)):
        trajectories = walks(walker, 30)
        labels, new = tree_labels(trajectories, Chain, walker)
        truth = {one.id: values(one, walker) for one in [*trajectories, *new]}
        tasks = {one.id: one.task for one in [*trajectories, *new]}
        errors = {}
        for label in labels:
            value = truth[label.trajectory_id][label.step]
            if label.meta.get("over"):
                assert label.score == value
            elif 0 < value < 1:
                low, high = label.meta["interval"]
                covered.append(low <= value <= high)
                errors.setdefault(tasks[label.trajectory_id], []).append((label.score - value, label.weight))
                if label.weight >= 8:
                    examined.append(label.score - value)
        by_tree += [statistics.mean(e for e, _ in pairs) for pairs in errors.values()]
        weighted += [(e, w) for pairs in errors.values() for e, w in pairs]
    assert abs(statistics.mean(by_tree)) < 2.5 * statistics.stdev(by_tree) / len(by_tree) ** 0.5
    assert abs(sum(e * w for e, w in weighted) / sum(w for _, w in weighted)) < 0.02
    assert abs(statistics.mean(examined)) < 0.02
    assert 0.93 <= statistics.mean(covered) <= 0.975


def test_first_errors_are_found():
    walker = Walker(slip=0.05, again=1.0, fix=0.0)
    failed = [one for one in walks(walker, 60, LongChain) if one.outcome == 0][:15]
    labels, _ = tree_labels(failed, LongChain, walker, MonteCarloConfig(k=16, searches=1))
    right = []
    for one in failed:
        scores = {x.step: x.score for x in labels if x.trajectory_id == one.id and not x.meta.get("over")}
        dead = [t for t, score in scores.items() if score == 0]
        alive = [t for t, score in scores.items() if score > 0]
        first = min(dead, default=19)
        right.append(first == values(one, walker, 20).index(0) and first - max(alive, default=-1) == 1)
        assert len(scores) <= 2 * math.ceil(math.log2(20)) + 1
    assert statistics.mean(right) > 0.85


def test_new_trajectories_replay_and_every_label_speaks_of_a_known_one():
    walker = Walker(words=2)
    trajectories = walks(walker, 5)
    labels, new = tree_labels(trajectories, Chain, walker)
    known = {one.id: one for one in [*trajectories, *new]}
    assert len(known) == len(trajectories) + len(new)
    for label in labels:
        assert label.step < len(known[label.trajectory_id].steps) and label.source == "tree:walker"
    states = [(known[x.trajectory_id].task, known[x.trajectory_id].steps[: x.step + 1]) for x in labels]
    own = [s for x, s in zip(labels, states, strict=True) if x.trajectory_id in {t.id for t in new}]
    assert len(set(own)) == len(own)
    for one in new:
        assert replay(Chain(), one).outcome == one.outcome


def test_one_tree_for_trajectories_of_one_task():
    a, b = walks(Walker(words=9), 1)[0], walks(Walker(words=9), 1, seed=7)[0]
    again = Trajectory(a.task, (*a.steps[:-1], Step("slip 3", "1")), 0.0, a.meta)
    assert same_start([a, b, again]) == [[a, again], [b]]


def grow(walker, config, n=1):
    """The requests of the searches of one tree, in order."""
    asked = []
    runner = Runner(walker, LongChain, Limits())
    submit = runner.submit
    runner.submit = lambda request: (asked.append(request), submit(request))
    trajectories = [one for one in walks(walker, 40, LongChain) if one.outcome == 0][:n]
    product = [p for _, p in drive([(0, grown(trajectories, config, "tree:w"))], runner, Journal())]
    return asked, product[0]


def test_each_state_gets_k_continuations_and_each_rollout_is_searched_once():
    asked, (labels, _) = grow(Walker(slip=0.1, words=3), MonteCarloConfig(k=8, searches=12))
    drawn = [r.key for r in asked if r.draw >= 0]
    assert len(drawn) == len(set(drawn)) and len(drawn) % 8 == 0
    assert all(x.weight >= 1 for x in labels) and max(x.weight for x in labels) >= 8


def test_every_continuation_counts_where_it_comes_by():
    walker = Walker(words=5)
    one = walks(Walker(slip=0, words=5), 1)
    labels, new = tree_labels(one, Chain, walker, MonteCarloConfig(k=8, searches=1))
    paths = {t.id: t.steps for t in new}
    from_start = [t for t in new if t.steps[:1] != one[0].steps[:1]]
    assert from_start
    labelled = {(x.trajectory_id, x.step) for x in labels}
    assert all((t.id, len(paths[t.id]) - 1) in labelled for t in new)  # the end of each, and what leads there
    alone = [x for x in labels if x.weight == 1]
    assert alone and {x.score for x in alone} <= {0.0, 1.0}


def test_the_choice_is_the_paper_s():
    config = MonteCarloConfig()
    start = Trajectory("t", [Step("a")])
    tree = Tree(start)

    def node(name, outcomes, visits):
        tree.nodes[(Step(name),)] = Node([Continuation("ended", float(o)) for o in outcomes], visits=visits)
        return (Step(name),)

    high, low, seen = node("h", "1110", 0), node("l", "1000", 0), node("s", "1110", 9)
    a, b, c = Rollout(high, (Step("x"),), 100), Rollout(low, (Step("x"),), 100), Rollout(seen, (Step("y"),), 100)
    longer = Rollout(high, (Step("x"), Step("y")), 400)
    tree.pool = [b, longer, c, a]
    assert tree.select(config) == a and tree.nodes[high].visits == 1 and a not in tree.pool
    q = {r: 0.5 ** (1 - tree.nodes[r.start].value) * 0.9 ** (r.length / 500) for r in tree.pool}
    u = {r: 0.125 * math.sqrt(10) / (1 + tree.nodes[r.start].visits) for r in tree.pool}
    best = max(tree.pool, key=lambda r: q[r] + u[r])
    assert tree.select(config) == best


def test_a_tree_goes_on_where_it_was_stopped(tmp_path):
    walker = Walker(slip=0.2, words=2)
    trajectories = walks(walker, 8)
    expected, made = tree_labels(trajectories, Chain, walker)
    out, new = tmp_path / "l.jsonl", tmp_path / "t.jsonl"
    for stop in (4, 11, 19, None):
        try:
            labels, grew = tree_labels(trajectories, Chain, Counting(walker, stop), out=out, new=new)
        except KeyboardInterrupt:
            continue
    assert key(labels) == key(expected) == key(read_jsonl(out, StepLabel))
    assert {t.id for t in grew} == {t.id for t in made} == {t.id for t in read_jsonl(new, Trajectory)}
    again = Counting(walker)
    assert key(tree_labels(trajectories, Chain, again, out=out, new=new)[0]) == key(expected) and again.calls == 0


def test_a_budget_ends_a_tree_and_what_is_known_is_labelled():
    walker = Walker(slip=0.2, words=2)
    labels, _ = tree_labels(walks(walker, 3), Chain, walker, MonteCarloConfig(budget=40))
    assert any(not x.meta.get("over") for x in labels)


def test_what_makes_no_sense_is_refused(tmp_path):
    with pytest.raises(UsageError, match="k >= 2"):
        tree_labels(walks(Walker(), 1), Chain, Walker(), MonteCarloConfig(k=1))
    with pytest.raises(UsageError, match="written nowhere"):
        tree_labels(walks(Walker(), 1), Chain, Walker(), out=tmp_path / "l.jsonl")
    assert Request(walks(Walker(), 1)[0], 0, 0).key
