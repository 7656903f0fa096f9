"""Optional parts, each a room by itself; nothing outside of a plug-in names one."""
