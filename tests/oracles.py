"""What the papers say, in dense float64 NumPy: nothing here knows decentjax.

Mixing matrices have shape [period, N, N]; row i is what worker i ends up with.
"""

import numpy as np


def complete(n):
    return np.ones((1, n, n)) / n


def ring(n):
    return _neighbours(n, lambda i: [i, i - 1, i + 1])[None]


def one_peer_ring(n):
    if n == 1:
        return np.eye(1)[None]
    even = [[i, (i + 1) % n] for i in range(0, n, 2)]
    odd = [[i, (i - 1) % n] for i in range(0, n, 2)]
    return np.stack([group_means(n, even), group_means(n, odd)])


def random_matching(n, period, seed):
    """Pairs are neighbours in a random order; of an odd number the last rests."""
    generator = np.random.default_rng(seed)
    orders = [generator.permutation(n) for _ in range(period)]
    pairs = [[order[k : k + 2] for k in range(0, n, 2)] for order in orders]
    return np.stack([group_means(n, of_round) for of_round in pairs])


def exponential(n):
    hops = [2**r for r in range(n) if 2**r < n]
    return _neighbours(n, lambda i: [i] + [i - hop for hop in hops])[None]


def one_peer_exponential(n):
    hops = [2**r for r in range(n) if 2**r < n] or [0]
    return np.stack([_neighbours(n, lambda i, hop=hop: [i, i - hop]) for hop in hops])


def k_peer_exponential(n, degree):
    """SGP's graph: at step t a worker sends to +2^t, +2^(t+1), ..., exponents mod L."""
    if n == 1:
        return np.eye(1)[None]
    phases = int(np.ceil(np.log2(n)))
    matrices = np.zeros((phases, n, n))
    for t in range(phases):
        for sender in range(n):
            hops = [2 ** ((t + k) % phases) for k in range(degree)]
            for receiver in (sender, *((sender + hop) % n for hop in hops)):
                matrices[t, receiver, sender] += 1 / (degree + 1)
    return matrices


def hypercube(n):
    """Decent-DP's one-peer-exp: pairs differ in one bit."""
    hops = [2**r for r in range(n) if 2**r < n] or [0]
    return np.stack([_neighbours(n, lambda i, hop=hop: [i, i ^ hop]) for hop in hops])


def alternating_exponential_ring(n, workers_per_node):
    """Algorithms 1.4: of even count, a pair is joint in the second of two sub-steps."""
    num_nodes = n // workers_per_node
    node_groups = []
    count = 0
    hop = 1
    while hop < num_nodes:
        joint = {0: [], 1: []}
        for node in range(num_nodes):
            if (node // hop) % 2 == 0:
                joint[1 if count % 2 == 0 else 0].append([node, node + hop])
                count += 1
        for sub_step in (0, 1):
            busy = {node for pair in joint[sub_step] for node in pair}
            alone = [[node] for node in range(num_nodes) if node not in busy]
            node_groups.append(joint[sub_step] + alone)
        hop *= 2
    node_groups = node_groups or [[[0]]]
    return np.stack(
        [
            group_means(n, [_workers_of(nodes, workers_per_node) for nodes in groups])
            for groups in node_groups
        ]
    )


def torus(n):
    """Self and the neighbours on the grid whose sides are closest, alike."""
    rows = next(r for r in range(int(n**0.5 + 0.5), 0, -1) if n % r == 0)
    columns = n // rows
    return _neighbours(
        n,
        lambda i: [
            i,
            (i // columns - 1) % rows * columns + i % columns,
            (i // columns + 1) % rows * columns + i % columns,
            i // columns * columns + (i % columns - 1) % columns,
            i // columns * columns + (i % columns + 1) % columns,
        ],
    )[None]


def star(n):
    """Metropolis: 1 / (1 + the larger degree) on an edge, the rest on oneself."""
    degree = [n - 1] + [1] * (n - 1)
    matrix = np.zeros((n, n))
    for i in range(1, n):
        matrix[0, i] = matrix[i, 0] = 1 / (1 + max(degree[0], degree[i]))
    return (matrix + np.diag(1 - matrix.sum(1)))[None]


def ring_lattice(n, degree):
    if n == 1:
        return np.eye(1)[None]
    half = degree // 2
    return _neighbours(n, lambda i: [i + h for h in range(-half, half + 1)])[None]


def butterfly_groups(n, group_size):
    """Algorithm 1 of WAGMA with mask = 1 << shift, until the masks come round."""
    if n == 1:
        return np.eye(1)[None]
    global_phases = n.bit_length() - 1
    group_phases = group_size.bit_length() - 1
    rounds, seen, t = [], [], 0
    while True:
        shift = (t * group_phases) % global_phases
        if shift in seen:
            return np.stack([group_means(n, groups) for groups in rounds])
        seen.append(shift)
        group_of = {p: frozenset([p]) for p in range(n)}
        for _ in range(group_phases):
            for p in range(n):
                union = group_of[p] | group_of[p ^ (1 << shift)]
                group_of.update(dict.fromkeys(union, union))
            shift = (shift + 1) % global_phases
        rounds.append([sorted(group) for group in set(group_of.values())])
        t += 1


def hierarchical(node_matrices, per_node):
    inside = np.full((per_node, per_node), 1 / per_node)
    return np.stack([np.kron(matrix, inside) for matrix in node_matrices])


def damped(matrices, factor):
    return (1 - factor) * np.eye(matrices.shape[-1]) + factor * matrices


def with_mean_every(matrices, period):
    """Algorithm 2 of WAGMA: global where (t + 1) mod tau is 0."""
    rounds = []
    for t in range(len(matrices) * period):
        is_global = (t + 1) % period == 0
        everyone = np.full(matrices[0].shape, 1 / len(matrices[0]))
        rounds.append(everyone if is_global else matrices[t % len(matrices)])
    return np.stack(rounds)


def group_means(n, groups):
    """The mixing matrix of means over disjoint groups that cover all workers."""
    matrix = np.zeros((n, n))
    for group in groups:
        for i in group:
            for j in group:
                matrix[i, j] = 1 / len(group)
    return matrix


def sinkhorn(generator, n):
    """A random dense doubly stochastic matrix."""
    matrix = generator.uniform(0.1, 1, (n, n))
    for _ in range(200):
        matrix /= matrix.sum(0, keepdims=True)
        matrix /= matrix.sum(1, keepdims=True)
    return matrix


def adam_update(grads, b1=0.9, b2=0.999, eps=1e-8, eps_root=0.0):
    """The direction of each step, before the learning rate."""
    m = v = np.zeros_like(np.asarray(grads[0], np.float64))
    directions = []
    for t, g in enumerate(np.asarray(grads, np.float64), start=1):
        m = b1 * m + (1 - b1) * g
        v = b2 * v + (1 - b2) * g**2
        root = np.sqrt(v / (1 - b2**t) + eps_root)
        directions.append(m / (1 - b1**t) / (root + eps))
    return directions


def accum_adam_update(grads, s, b1=0.9, b2=0.999, eps=1e-8, eps_root=0.0):
    """Algorithm 4 of From Promise to Practice: the direction of each step."""
    m_bar = v_bar = b = np.zeros_like(np.asarray(grads[0], np.float64))
    directions = []
    for t, g in enumerate(np.asarray(grads, np.float64), start=1):
        k = -(-t // s)
        m = b1 * m_bar + (1 - b1) * g
        v = b2 * v_bar + (1 - b2) * g**2
        root = np.sqrt(v / (1 - b2**k) + eps_root)
        directions.append(m / (1 - b1**k) / (root + eps))
        b = b + g / s
        if t % s == 0:
            m_bar = b1 * m_bar + (1 - b1) * b
            v_bar = b2 * v_bar + (1 - b2) * b**2
            b = np.zeros_like(b)
    return directions


def weighted_mean(matrix, weights, x):
    """`sum_j W_ij n_j x_j / sum_j W_ij n_j`, or `x_i` where nobody has a weight."""
    total = (matrix @ weights)[:, None]
    sums = matrix @ (weights[:, None] * x)
    return np.where(total > 0, sums / np.where(total > 0, total, 1), x)


def awc(matrices, x0, gradient, lr, num_steps):
    """x <- W x - lr grad(x): the models [N, d] after each step, [num_steps, N, d].

    `gradient` maps the models of all workers, [N, d], to their gradients.
    """
    x, models = np.asarray(x0, np.float64), []
    for t in range(num_steps):
        x = matrices[t % len(matrices)] @ x - lr * gradient(x)
        models.append(x)
    return np.stack(models)


def atc(matrices, x0, gradient, lr, num_steps):
    """x <- W (x - lr grad(x)); else as `awc`."""
    x, models = np.asarray(x0, np.float64), []
    for t in range(num_steps):
        x = matrices[t % len(matrices)] @ (x - lr * gradient(x))
        models.append(x)
    return np.stack(models)


def all_reduce(x0, gradient, lr, num_steps):
    """x <- x - lr (mean of the gradients of all workers); else as `awc`."""
    x, models = np.asarray(x0, np.float64), []
    for _ in range(num_steps):
        x = x - lr * gradient(x).mean(0, keepdims=True)
        models.append(x)
    return np.stack(models)


def wagma_sgd(x0, gradient, lr, momentum, group_size, tau, num_steps, order):
    """Algorithms 1 and 2 of WAGMA with mask = 1 << shift, and no worker stale.

    Order "atc" is the paper's, "awc" that of its code, which averages the models from
    before the update. `gradient` maps models [N, d] and t to [N, d]; else as `awc`.
    """
    x, speed, models = np.asarray(x0, np.float64), 0.0, []
    for t in range(num_steps):
        speed = momentum * speed + gradient(x, t)
        update = -lr * speed
        if order == "atc":
            x = _wagma_average(x + update, t, group_size, tau)
        else:
            x = _wagma_average(x, t, group_size, tau) + update
        models.append(x)
    return np.stack(models)


def _wagma_average(x, t, group_size, tau):
    if (t + 1) % tau == 0:
        return np.stack([sum(x) / len(x)] * len(x))
    global_phases, group_phases = int(np.log2(len(x))), int(np.log2(group_size))
    for r in range(group_phases):  # Recursive doubling: all sums grow by a partner's.
        mask = 1 << (t * group_phases + r) % global_phases
        x = np.stack([x[p] + x[p ^ mask] for p in range(len(x))])
    return x / group_size


def push_sum(x0, gradient, lr, degree, num_steps):
    """SGP, message by message: the de-biased models, as `awc`, and weights [T, N].

    `gradient` maps models [N, d] and t to [N, d].
    """
    x = np.asarray(x0, np.float64)
    weight, models, weights = np.ones(len(x)), [], []
    phases = int(np.ceil(np.log2(len(x))))
    for t in range(num_steps):
        x = x - lr * gradient(x / weight[:, None], t)
        hops = [0, *(2 ** ((t + k) % phases) for k in range(degree))]
        sent, sent_weight = x / len(hops), weight / len(hops)
        x, weight = np.zeros_like(x), np.zeros_like(weight)
        for sender in range(len(x)):
            for hop in hops:
                x[(sender + hop) % len(x)] += sent[sender]
                weight[(sender + hop) % len(x)] += sent_weight[sender]
        models.append(x / weight[:, None])
        weights.append(weight)
    return np.stack(models), np.stack(weights)


def _neighbours(n, heard):
    """Worker i averages over the workers `heard(i)`, taken modulo n, each once."""
    matrix = np.zeros((n, n))
    for i in range(n):
        distinct = {j % n for j in heard(i)}
        for j in distinct:
            matrix[i, j] = 1 / len(distinct)
    return matrix


def _workers_of(nodes, per_node):
    return [node * per_node + k for node in nodes for k in range(per_node)]


def power_sgd(matrices, basis):
    """PowerSGD of gradients with errors, [N, m, n]: their mean, and the next basis.

    Algorithm 1 of Vogels et al. (2019), whose bases of columns are not orthonormal.
    """
    rows = np.linalg.qr((matrices @ basis).mean(0))[0]
    columns = (matrices.transpose(0, 2, 1) @ rows).mean(0)
    return rows @ columns.T, columns
