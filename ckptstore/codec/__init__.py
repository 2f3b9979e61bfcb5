"""Codecs: alternatives behind one Protocol, by the name that a chunk's row carries."""
