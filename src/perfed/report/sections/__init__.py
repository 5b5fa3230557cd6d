"""The sections of a report's page."""

from perfed.report.sections.base import PageSection
from perfed.report.sections.clients import distribution_section, gain_section, label_section
from perfed.report.sections.runs import environment_section, settings_section, time_section
from perfed.report.sections.scores import curve_section, headline_section
from perfed.report.sections.theory import theory_section
from perfed.report.sections.worse_off import worse_off_section

__all__ = [
    "PageSection",
    "curve_section",
    "distribution_section",
    "environment_section",
    "gain_section",
    "headline_section",
    "label_section",
    "settings_section",
    "theory_section",
    "time_section",
    "worse_off_section",
]
