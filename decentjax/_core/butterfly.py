"""The groups of WAGMA-SGD, as distances between partners."""


def default_group_size(num_workers: int) -> int:
    """Returns the smallest power of two that is at least sqrt(N), for such an N."""
    return 2 ** (num_workers.bit_length() // 2)


def butterfly_hops(num_workers: int, group_size: int, step: int) -> list[int]:
    """Returns the distances in a group of `butterfly_groups`: partner = i XOR hop.

    The members of a group exchange in pairs, in log2(group_size) hops: for 8 workers in
    groups of 4 these are 1 2, 4 1 and 2 4, then 1 2 again.
    """
    bits, active = num_workers.bit_length() - 1, group_size.bit_length() - 1
    return [1 << (step * active + r) % bits for r in range(active)]
