"""Whether a study's log follows the rules of its rungs."""

from __future__ import annotations

from collections import Counter


def check_promotions(records, study, parallel):
    """Check each promotion against the reports before it, by its rule written out again."""
    cuts, factor, most = study.rungs.cuts, study.rungs.factor, study.tune.budget.trials
    scores, running, kept, failed = {}, set(), {}, set()
    for record in records:
        number = record.get("number")
        bracket = number is not None and study.rungs.bracket(number)
        if record["kind"] == "started":
            assert record["until"] == cuts[bracket]
            running.add(number)
        elif record["kind"] == "reported":
            losses = [metrics["loss"] for _, metrics in record["validations"]]
            running.discard(number)
            best = min([*losses, *(s.get(number, 99) for s in scores.values())])
            scores.setdefault((bracket, record["until"]), {})[number] = best
            kept[number] = record["until"]
        elif record["kind"] == "failed":
            running.discard(number)
            failed.add(number)
        elif record["kind"] == "discarded":
            del kept[number]
        elif record["kind"] == "promoted":
            rung = kept.pop(number)
            assert cuts.index(record["until"]) == cuts.index(rung) + 1
            at_rung = scores[bracket, rung]
            better = {n for n, s in at_rung.items() if (s, n) < (at_rung[number], number)}
            if study.rungs.by_median:
                legal = len(at_rung) <= 5 or len(better) < -(-len(at_rung) // 2)
            else:
                legal = len(better) < len(at_rung) // factor or (not running and better <= failed)
            assert legal, record
            running.add(number)
        kept_at = Counter(
            (study.rungs.bracket(n), step) for n, step in kept.items() if step < cuts[-1]
        )
        for (where, step), count in kept_at.items():
            reachable = study.rungs.most(where, cuts.index(step), most)
            # As many as train at once may have just reported, and are discarded next.
            assert study.rungs.by_median or count <= study.rungs.promoted(reachable) + parallel
