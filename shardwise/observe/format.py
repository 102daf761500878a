"""Numbers for people: three significant digits, a unit, and no exponent where a prefix is enough."""

from __future__ import annotations


def format_count(value: float) -> str:
    """Format a large count: 950, 41.2k, 1.24M, 3.1B."""
    for limit, divisor, letter in ((1e3, 1.0, ""), (1e6, 1e3, "k"), (1e9, 1e6, "M"), (1e12, 1e9, "B")):
        if abs(value) < limit * 0.9995:
            return _three_digits(value / divisor) + letter
    return _three_digits(value / 1e12) + "T"


def format_bytes(bytes: float) -> str:
    """Format bytes in binary units: 512 B, 1.5 KiB, 12.3 GiB."""
    unit = 0
    while abs(bytes) >= 1023.5 and unit < 5:
        bytes, unit = bytes / 1024, unit + 1
    return f"{_three_digits(bytes)} {('B', 'KiB', 'MiB', 'GiB', 'TiB', 'PiB')[unit]}"


def format_duration(seconds: float) -> str:
    """Format a time as on a clock: 0:07, 1:23, 2:03:04, 3 d 04:05."""
    whole = max(0, round(seconds))
    minutes, hours, days = whole // 60 % 60, whole // 3600 % 24, whole // 86400
    if days:
        return f"{days} d {hours:02}:{minutes:02}"
    return f"{hours}:{minutes:02}:{whole % 60:02}" if hours else f"{minutes}:{whole % 60:02}"


def format_span(seconds: float) -> str:
    """Format a length of time in a suitable unit: 7.9 minutes, 3.2 hours, 54 days."""
    for unit, name, limit in (
        (1.0, "seconds", 120.0),
        (60.0, "minutes", 7200.0),
        (3600.0, "hours", 172800.0),
    ):
        if seconds < limit:
            return f"{format_figure(seconds / unit)} {name}"
    return f"{format_figure(seconds / 86400)} days"


def format_energy(kwh: float) -> str:
    """Format energy: 0.21 kWh, 1,430 MWh."""
    return f"{format_figure(kwh)} kWh" if kwh < 1000 else f"{format_figure(kwh / 1000)} MWh"


def format_figure(value: float) -> str:
    """Format a number with three digits, or all digits before the point: 0.0021, 7.94, 1,234."""
    return f"{value:,.0f}" if abs(value) >= 99.95 else f"{value:.3g}"


def format_percent(fraction: float | None) -> str:
    """Format a fraction as a percentage; n/a if it is not known."""
    return "n/a" if fraction is None else f"{fraction:.1%}".replace("%", " %")


def _three_digits(value: float) -> str:
    magnitude = abs(value)
    if value == int(value) and magnitude < 1000:
        return f"{value:.0f}"
    return f"{value:.2f}" if magnitude < 9.995 else f"{value:.1f}" if magnitude < 99.95 else f"{value:.0f}"
