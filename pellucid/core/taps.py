"""Taps: functions that see, and may replace, what passes a site. No global state, no registered hooks."""

from collections.abc import Callable, Iterable, Mapping

import torch
from torch import Tensor

from pellucid.core.config import ModelConfig
from pellucid.core.sites import check_sites, model_sites


class Tap:
    """A callable `tap(site, tensor) -> tensor` with the `sites` it wants; None is all cheap ones."""

    sites: frozenset[str] | None

    def __init__(self, sites: Iterable[str] | None):
        if isinstance(sites, str):
            raise ValueError(f"sites must be a collection of names, got the string {sites!r}")
        self.sites = None if sites is None else frozenset(sites)

    def __call__(self, site: str, x: Tensor) -> Tensor:
        raise NotImplementedError

    @staticmethod
    def at(function: Callable[[str, Tensor], Tensor], sites: Iterable[str] | None) -> "Tap":
        """`function` as a tap at `sites`."""
        return _Function(function, sites)


class _Function(Tap):
    def __init__(self, function: Callable[[str, Tensor], Tensor], sites: Iterable[str] | None):
        super().__init__(sites)
        self.function = function

    def __call__(self, site: str, x: Tensor) -> Tensor:
        return self.function(site, x)


class Recorder(Tap):
    """Keeps what passes each site in `values`; over several runs the last one. Gradients stay attached."""

    def __init__(self, sites: Iterable[str] | None = None):
        super().__init__(sites)
        self.values: dict[str, Tensor] = {}

    def __call__(self, site: str, x: Tensor) -> Tensor:
        self.values[site] = x
        return x


class Patch(Tap):
    """Replaces each site's value by the given tensor, which must have the same shape."""

    def __init__(self, values: Mapping[str, Tensor]):
        super().__init__(values)
        self.values = dict(values)

    def __call__(self, site: str, x: Tensor) -> Tensor:
        value = self.values[site]
        if value.shape != x.shape:
            raise ValueError(f"patch at {site!r} has shape {tuple(value.shape)}, the site {tuple(x.shape)}")
        return value.to(x)


class Mask(Tap):
    """Keeps each site's channels by a bool mask or one in [0, 1]; the rest is replaced: `m * x + (1 - m) * fill`.

    `masks[site]` has shape (width,) or any shape that broadcasts to the site's, and `fill[site]` too
    (default 0); a fill of (positions, width) is cut to the sequence. Gradients flow into both.
    """

    def __init__(self, masks: Mapping[str, Tensor], fill: Mapping[str, Tensor] | None = None):
        super().__init__(masks)
        self.masks, self.fill = dict(masks), dict(fill or {})

    def __call__(self, site: str, x: Tensor) -> Tensor:
        fill, mask = self.fill.get(site), self.masks[site]
        fill = x.new_zeros(()) if fill is None else fill.to(x.dtype)
        if fill.dim() == 2:
            fill = fill[: x.shape[1]]
        if mask.dtype == torch.bool:
            return torch.where(mask, x, fill)
        # Exactly x at 1 and, where x is finite, exactly fill at 0.
        return torch.lerp(fill, x, mask.to(x.dtype))


class Ablate(Tap):
    """Replaces some channels of each site by `fill` (default 0): `channels[site]` lists which, None is all."""

    def __init__(
        self, channels: Mapping[str, Iterable[int] | None], fill: Mapping[str, Tensor] | None = None
    ):
        super().__init__(channels)
        self.channels = {site: None if c is None else list(c) for site, c in channels.items()}
        self.fill = dict(fill or {})

    def __call__(self, site: str, x: Tensor) -> Tensor:
        chosen, width = self.channels[site], x.shape[-1]
        if chosen and not all(0 <= c < width for c in chosen):
            raise ValueError(f"channels of {site!r} must be in 0..{width - 1}, got {chosen}")
        ablated = torch.zeros(width, dtype=torch.bool, device=x.device)
        ablated[slice(None) if chosen is None else chosen] = True
        return torch.where(ablated, self.fill.get(site, x.new_zeros(())).to(x), x)


class _Chain(Tap):
    def __init__(self, taps: tuple[Tap, ...]):
        sites = [t.sites for t in taps]
        super().__init__(None if None in sites else frozenset().union(*(s for s in sites if s is not None)))
        self.taps = taps

    def resolve(self, config: ModelConfig) -> "_Chain":
        return _Chain(
            tuple(
                t.resolve(config) if isinstance(t, _Chain) else Tap.at(t, _resolved(t, config))
                for t in self.taps
            )
        )

    def __call__(self, site: str, x: Tensor) -> Tensor:
        for tap in self.taps:
            if tap.sites is None or site in tap.sites:
                x = tap(site, x)
        return x


def chain(*taps: Tap) -> Tap:
    """One tap that applies each of `taps` in turn, at its own sites."""
    return _Chain(taps)


def _resolved(tap: Tap, config: ModelConfig) -> frozenset[str]:
    """The sites of `tap` in a model of this config; None becomes all cheap ones."""
    if tap.sites is None:
        return frozenset(name for name, site in model_sites(config).items() if site.cheap)
    return tap.sites


class LiveTap:
    """A tap during one forward pass: checked against the model's sites, and afterwards for sites that it missed."""

    def __init__(self, tap: Tap, config: ModelConfig):
        if isinstance(tap, _Chain):
            tap = tap.resolve(config)
        self.tap, self.sites = tap, _resolved(tap, config)
        check_sites(self.sites, config)
        self.missed = set(self.sites)

    def __call__(self, site: str, x: Tensor) -> Tensor:
        if site not in self.sites:
            return x
        self.missed.discard(site)
        y = self.tap(site, x)
        if y.shape != x.shape:
            raise ValueError(f"a tap changed the shape of {site!r} from {tuple(x.shape)} to {tuple(y.shape)}")
        if y.dtype != x.dtype and not x.is_floating_point():
            raise ValueError(f"a tap must give {x.dtype} at {site!r}, got {y.dtype}")
        return y

    def finish(self) -> None:
        """Raise if a site that the tap names was never reached."""
        if self.missed:
            raise RuntimeError(f"taps at {sorted(self.missed)} never fired")
