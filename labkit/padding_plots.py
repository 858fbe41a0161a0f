"""A figure of how much padding is computed."""

from matplotlib.axes import Axes

from labkit.canvas import finish, new_axes


def plot_padding(shares: dict[str, float], ax: Axes | None = None) -> Axes:
    """A bar for each way of making batches: the share of computed tokens that are padding.

    Args:
        shares: From ``padding_shares``.
        ax: Where to draw; a new figure if left out.
    """
    ax = ax or new_axes()
    names = list(shares)
    bars = ax.barh(names, [100 * shares[name] for name in names])
    ax.bar_label(bars, [f"{shares[name]:.1%}" for name in names], padding=4)
    ax.set(xlabel="padding, % of computed tokens", xlim=(0, 110))
    ax.invert_yaxis()
    return finish(
        ax, "Padding in an epoch, by the way of making batches", "counted, not measured"
    )
