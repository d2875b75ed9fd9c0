"""`octavo run-batch`: a file of requests in, a file of answers out, in the form of OpenAI's batch API.

`lines` reads the requests, `answers` keeps what has been answered and survives a kill, `transfer` fetches and sends
files over HTTP, and `run` puts them together around the application that `octavo serve` serves too.
"""
