"""Pictures of meshes and layouts, as text for a terminal and as HTML pages. Nothing here prints or writes."""

from xrank.pictures.html_page import layout_html, survey_html
from xrank.pictures.text_picture import layout_text, survey_text

__all__ = ["layout_html", "layout_text", "survey_html", "survey_text"]
