"""Optional parts, each self-contained; nothing outside of a plug-in names one."""
