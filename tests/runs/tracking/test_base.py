from es_cookbook.rl.types import TrajectoryGroup
from es_cookbook.runs.tracking.base import choose_rollouts
from tests.fakes import trajectory


def make_group(num_genomes: int, attempts: int) -> TrajectoryGroup:
    return TrajectoryGroup([[trajectory(1.0)] * attempts for _ in range(num_genomes)])


def test_the_same_rollouts_are_chosen_again_and_others_in_another_generation() -> None:
    groups_P = [make_group(8, 2)] * 5

    def places(run_seed: int, generation: int) -> list[tuple[int, int, int]]:
        chosen = choose_rollouts(run_seed, generation, groups_P, 6)
        return [(sampled.problem, sampled.genome, sampled.attempt) for sampled in chosen]

    assert places(0, 3) == places(0, 3)
    assert len(set(places(0, 3))) == 6
    assert [(p, g ^ 1, k) in places(0, 3) for p, g, k in places(0, 3)] == [True] * 6, "in pairs"
    assert places(0, 3) != places(0, 4) and places(0, 3) != places(1, 3)
    seen = {place for generation in range(200) for place in places(0, generation)}
    assert len(seen) == 5 * 8 * 2, "every rollout has its chance"


def test_fewer_rollouts_than_asked_for_are_all_chosen() -> None:
    assert len(choose_rollouts(0, 0, [make_group(1, 1)], 6)) == 1
    assert len(choose_rollouts(0, 0, [make_group(1, 8)], 6)) == 6
    assert len(choose_rollouts(0, 0, [make_group(3, 1)], 3)) == 3
    assert choose_rollouts(0, 0, [], 6) == []
