"""Pictures of meshes, layouts, reports and schedules: text for a terminal, HTML for notebooks and pages."""

from xrank.pictures.picture import Picture, layout_html, show, survey_html
from xrank.pictures.text_picture import layout_text, survey_text

__all__ = ["Picture", "layout_html", "layout_text", "show", "survey_html", "survey_text"]
