"""Where objects live: one Protocol (base) and the implementations that are alternatives behind it."""
