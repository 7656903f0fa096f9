"""Where a process and those that it has started can be reached from other machines."""

_THIS_MACHINE = {"127.0.0.1", "::1", "::ffff:127.0.0.1"}


def listening() -> tuple[int, set[str]]:
    """Return the number of open ports, and the addresses that other machines can reach."""
    import psutil  # Comes with vLLM.

    own = psutil.Process()
    processes = {own.pid, *(child.pid for child in own.children(recursive=True))}
    addresses = [
        connection.laddr.ip
        for connection in psutil.net_connections("inet")
        if connection.pid in processes and connection.status == psutil.CONN_LISTEN
    ]
    return len(addresses), set(addresses) - _THIS_MACHINE
