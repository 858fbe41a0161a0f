"""A record of ``peers.py`` as a table and sentences."""

from statistics import median, quantiles

from labkit.report import format_bytes

HEADINGS = (
    "Contender", "Settings", "Real tokens/s", "Speed (quartiles)", "Peak of a step",
    "Share of the limit", "Loss, first → last",
)  # fmt: skip


def rates(contender: dict) -> list[float]:
    """Real tokens per second of each slice."""
    return [part["real_tokens"] / part["seconds"] for part in contender["slices"]]


def total_rate(contender: dict) -> float | None:
    """Real tokens per second over all slices."""
    seconds = sum(part["seconds"] for part in contender["slices"])
    return (
        sum(part["real_tokens"] for part in contender["slices"]) / seconds if seconds else None
    )


def ratio(contender: dict, reference: dict) -> tuple[float, float, float] | None:
    """How many times as fast as the reference: median over the rounds, and quartiles."""
    both = list(zip(rates(contender), rates(reference), strict=False))
    if not both:
        return None
    ratios = [one / other for one, other in both]
    if len(ratios) == 1:
        return ratios[0], ratios[0], ratios[0]
    first, _, third = quantiles(ratios, n=4, method="inclusive")
    return median(ratios), first, third


def limit(record: dict) -> tuple[str, float] | None:
    """The format that this machine multiplies fastest in, and its operations per second."""
    found = {name: rate["flops_per_second"] for name, rate in record["matrix_rates"].items()}
    return max(found.items(), key=lambda item: item[1]) if found else None


def fastest(record: dict) -> set[str]:
    """The fastest setting of each family."""
    best = {}
    for contender in record["contenders"]:
        rate = total_rate(contender)
        if rate and rate > best.get(contender["family"], ("", 0))[1]:
            best[contender["family"]] = (contender["name"], rate)
    return {name for name, _ in best.values()}


def rows(record: dict) -> list[tuple[str, ...]]:
    """A row of texts for each contender, under ``HEADINGS``."""
    by_name = {contender["name"]: contender for contender in record["contenders"]}
    reference, best = by_name.get(record["reference"]), fastest(record)
    highest = limit(record)
    found = []
    for contender in record["contenders"]:
        name = contender["name"] + (" (fastest)" if contender["name"] in best else "")
        rate = total_rate(contender)
        if rate is None:
            reason = f"{contender['status']}: {contender['reason']}"
            found.append((name, contender["settings"], reason, *[""] * (len(HEADINGS) - 3)))
            continue
        ratios = ratio(contender, reference) if reference else None
        losses = contender["losses"]
        found.append(
            (
                name,
                contender["settings"],
                f"{rate:,.0f}",
                "{:.2f}× ({:.2f}–{:.2f})".format(*ratios) if ratios else "",
                format_bytes(contender["peak_bytes"]),
                f"{rate * record['useful_flops_per_token'] / highest[1]:.1%}"
                if highest
                else "",
                f"{losses[0]:.3f} → {losses[-1]:.3f}",
            )
        )
    return found


def notes(record: dict) -> list[str]:
    """What has to be known to read the table, as sentences."""
    task, found = record["task"], []
    found.append(
        f"Measured on {record['machine']['name']}: {task['model']}, {task['batch_size']} pairs "
        f"a step of {task['data']['name']}, {record['rounds']} rounds of "
        f"{record['steps']} steps."
    )
    found.append(
        "Model, random weights, LoRA, pairs, batch size and learning rate are the same for all."
    )
    found.append(f"Speed is relative to {record['reference']}, round by round.")
    found.append(
        "A peak is that of a warm step on the largest batch of the contender's first epoch; a "
        "setting that sorts by length has its longest pairs in one batch."
    )
    if highest := limit(record):
        found.append(
            f"The limit is the highest rate of matrix products here, {highest[0]}, "
            f"{highest[1] / 1e9:,.0f} GFLOP/s; a real token needs "
            f"{record['useful_flops_per_token'] / 1e6:.1f} MFLOP."
        )
    for contender in record["contenders"]:
        compiled = sum(part["graphs"] for part in contender["slices"])
        if compiled:
            found.append(f"{contender['name']} compiled {compiled} graphs while it was timed.")
        if contender["slices"] and not contender["losses_sane"]:
            found.append(f"{contender['name']}: its losses are not those of training.")
        found += [f"{contender['name']}: {text}" for text in contender["repairs"]]
    return found


def markdown(record: dict) -> str:
    """The table and the sentences in Markdown."""
    lines = [HEADINGS, ["---"] * len(HEADINGS), *rows(record)]
    table = "".join("| " + " | ".join(line) + " |\n" for line in lines)
    return table + "\n" + "".join(f"- {text}\n" for text in notes(record))
