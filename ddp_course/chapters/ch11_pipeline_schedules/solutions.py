"""Solutions of the exercises of chapter 11."""


def my_one_f_one_b(rank: int, num_ranks: int, num_microbatches: int) -> list[str]:
    """Return a rank's actions in 1F1B: backward as soon as enough are in flight."""
    row: list[str] = []
    forwards = backwards = 0
    while backwards < num_microbatches:
        in_flight = forwards - backwards
        if forwards < num_microbatches and in_flight < num_ranks - rank:
            row.append(f"{rank}F{forwards}")
            forwards += 1
        else:
            row.append(f"{rank}B{backwards}")
            backwards += 1
    return row


def place_weights(row: list[str], rank: int) -> list[str]:
    """Return the row with a W for each I; at most `rank` W's are postponed."""
    placed, due = [], []
    for action in row:
        placed.append(action)
        if "I" in action:
            due.append(action.replace("I", "W"))
            if len(due) > rank:
                placed.append(due.pop(0))
    return placed + due


def who_waits(rows: list[list[str]]) -> dict[int, str]:
    """Return {rank: the action at which it waits forever}; empty if all finish."""
    last = max(
        int(action.replace("B", "F").split("F")[0]) for row in rows for action in row
    )
    done: set[str] = set()

    def can_run(action: str) -> bool:
        op = "F" if "F" in action else "B"
        stage, k = map(int, action.split(op))
        if op == "F":
            return stage == 0 or f"{stage - 1}F{k}" in done
        return f"{stage}F{k}" in done and (stage == last or f"{stage + 1}B{k}" in done)

    at = [0] * len(rows)
    going = True
    while going:
        going = False
        for rank, row in enumerate(rows):
            while at[rank] < len(row) and can_run(row[at[rank]]):
                done.add(row[at[rank]])
                at[rank] += 1
                going = True
    return {r: row[at[r]] for r, row in enumerate(rows) if at[r] < len(row)}
