"""Measuring servers and engines: `octavo bench`. The client needs aiohttp, which the extra `bench` installs."""
