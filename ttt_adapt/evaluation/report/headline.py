"""What was run, and the result in a sentence or two that claims no more than the intervals do."""

import math
from collections.abc import Mapping
from typing import Any

from ttt_adapt.evaluation.report.digits import NONE, bits, bounds, count, percent
from ttt_adapt.evaluation.report.markup import Child, Markup, clean, join, shorten, tag
from ttt_adapt.evaluation.report.pairing import Arm, Pairing

_VERSIONS = ("ttt-adapt", "python", "torch", "transformers", "faiss-cpu")


def result_sentence(pairing: Pairing) -> str:
    """The best arm against base, and against the next best."""
    if not pairing.query_ids:
        return "Nothing can be compared: no text was scored by the runs. See the failures below."
    ranked = pairing.ranked
    if not ranked:
        return _without_ratio(pairing)
    best = ranked[0]
    point, base = best.last, best.base_Q
    assert point is not None and point.ratio is not None and base is not None
    base_bits = pairing.texts.bits_per_byte(base)
    among = f", the best of {len(ranked)} ways to adapt" if len(ranked) > 1 else ""
    sentence = (
        f"With {best.label}{among}, the model needs {bits(point.bits_per_byte)} bits per byte "
        f"after {count(point.step, 'step')}, where it needs {bits(base_bits)} before: "
        f"{percent(point.ratio.value)} of base"
    )
    if not math.isfinite(point.ratio.low):
        return sentence + ". One text says nothing about uncertainty."
    sentence += f" (95% interval {bounds(point.ratio)}%, {count(len(base), 'text')}). "
    if point.ratio.high < 1.0:
        sentence += "That is a reliable improvement on these texts."
    elif point.ratio.low > 1.0:
        sentence += "So adapting made predictions worse."
    else:
        sentence += "The interval includes 100%: no reliable difference from base."
    return sentence + (_against_next(pairing, best, ranked[1]) if len(ranked) > 1 else "")


def _against_next(pairing: Pairing, best: Arm, other: Arm) -> str:
    if best.run.model_key != other.run.model_key:
        return ""
    ratio = pairing.texts.ratio(best.nats_QS[:, -1], other.nats_QS[:, -1])
    if not math.isfinite(ratio.low):
        return ""
    words = (
        f"it needs {100.0 * (1.0 - ratio.value):.1f}% fewer bits"
        if ratio.high < 1.0
        else f"the difference is within the noise: it needs {percent(ratio.value)} of its bits"
    )
    return f" Against the next best, {other.label}, {words} (ratio {bounds(ratio)}%)."


def _without_ratio(pairing: Pairing) -> str:
    arm = min(
        (arm for arm in pairing.arms if arm.last),
        key=lambda arm: arm.last.bits_per_byte if arm.last else math.inf,
    )
    assert arm.last is not None
    what = "without adaptation" if arm.is_base else f"with {arm.label}"
    return (
        f"The model needs {bits(arm.last.bits_per_byte)} bits per byte {what} "
        f"({count(len(pairing.query_ids), 'text')}); no run here adapts and has base scores to "
        "compare with."
    )


def facts(pairing: Pairing) -> Markup:
    """Model, data, protocol, counts and versions, each said once where the runs agree."""
    runs = [arm.run for arm in pairing.arms]
    rows: list[tuple[str, Child]] = [
        ("model", _agreed([_model(arm) for arm in pairing.arms])),
        ("texts", _agreed([run.setting("data", "path") for run in runs])),
        ("compared", _compared(pairing)),
        ("corpus", _agreed([run.setting("corpus", "path") for run in runs])),
        ("index", _agreed([_index(run.info.get("index")) for run in runs])),
        ("protocol", _agreed([_protocol(run.protocol) for run in runs])),
        ("seed", _agreed([_text(run.info.get("seed")) for run in runs])),
        ("made", _agreed([_text(run.info.get("created")) for run in runs], span=True)),
        ("versions", _agreed([_versions(run.info.get("versions")) for run in runs])),
    ]
    cells = [join(tag("dt", name), tag("dd", value)) for name, value in rows if value]
    return tag("dl", *cells, class_="facts")


def _model(arm: Arm) -> str:
    fingerprint = arm.run.model_fingerprint
    return arm.run.model + (f" ({fingerprint[:12]})" if fingerprint else "")


def _index(entry: Any) -> str:
    if not isinstance(entry, Mapping):
        return shorten(_text(entry), 24)
    parts = [str(entry[key]) for key in ("factory", "embedder") if entry.get(key)]
    if isinstance(entry.get("num_passages"), int):
        parts.insert(0, count(entry["num_passages"], "passage"))
    return clean(", ".join(parts))


def _compared(pairing: Pairing) -> str:
    compared, shared, union = (
        len(pairing.query_ids),
        pairing.num_shared,
        pairing.num_union,
    )
    num_bytes = int(pairing.texts.num_bytes_Q.sum())
    subsets = len(set(pairing.subsets))
    text = f"{count(compared, 'text')} in {count(subsets, 'subset')}, {num_bytes:,} bytes"
    if union > shared:
        text += f"; {union - shared:,} of {union:,} texts are not in every run and left out"
    if shared > compared:
        text += f"; {shared - compared:,} more have no score in some run and are left out"
    return text


def _protocol(name: str) -> str:
    known = {
        "full": "full (retrieve with the text that is scored)",
        "split": "split (retrieve with the first half, score the second)",
    }
    return known.get(name, name)


def _versions(entry: Any) -> str:
    if not isinstance(entry, Mapping):
        return ""
    return ", ".join(f"{name} {entry[name]}" for name in _VERSIONS if entry.get(name))


def _text(value: Any) -> str:
    return "" if value is None else clean(str(value))


def _agreed(values: list[str], *, span: bool = False) -> str:
    """One value when all agree; else all of them, or the first and last of a sorted span."""
    distinct = list(dict.fromkeys(value for value in values if value))
    if span and len(distinct) > 1:
        distinct = sorted(distinct)
        return f"{distinct[0]} {NONE} {distinct[-1]}"
    return "; ".join(distinct)
