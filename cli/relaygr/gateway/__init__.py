"""The HTTP gateway: a front door to the relay for programs that do not speak Kafka.

settings.py      addresses, token and bounds
bodies.py        request bodies and encodings: JSON and MessagePack; no HTTP
answers.py       the HTTP status and the body of each outcome and refusal; no HTTP
app.py           the ASGI application: token, bounds, the two calls
openapi.py       the OpenAPI document and the page at /
server.py        connections, start and orderly stop
"""
