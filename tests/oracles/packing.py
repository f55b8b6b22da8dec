"""First-fit decreasing as in the textbook: every item tries every row. Imports neither package."""


def first_fit_decreasing(lengths, capacity):
    rows, rooms = [], []
    for index in sorted(range(len(lengths)), key=lambda i: (-lengths[i], i)):
        for row, room in enumerate(rooms):
            if lengths[index] <= room:
                rows[row].append(index)
                rooms[row] -= lengths[index]
                break
        else:
            rows.append([index])
            rooms.append(capacity - lengths[index])
    return rows
