"""A live page over a cluster: `relaygr ui`, and the page of the demo. It reads and never writes.

reading   the few fields of a message that the page needs, without its histories and scores
model     folds messages, statuses, metrics and lag into a bounded snapshot; pure
reader    the thread that reads the topics, from their ends, without a group
scrape    the thread that reads processes' metrics
live      one cluster under observation: the model, its threads, and the lag monitor
page      the document that browsers get: a live model, and the comparison of two runs
server    the HTTP server: the page, its events, and the token
static    HTML, style and script; the page loads nothing from elsewhere
"""
