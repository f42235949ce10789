"""What is published: logs of interactions, read into one history for each user; and messages, from JSON lines or from a
topic of another system.

    reading, layouts, quoted, parquet, gather   a log, of any layout, becomes `Interactions`
    log_map                                     what a log calls its columns and events
    publish_log                                 sends `Interactions` as histories or behaviours
    json_lines, messages, publish_lines         JSON lines become messages, and are sent
    bridge, log_objects                         records of another topic become messages, and are sent
    registry, registered, avro, protobuf        reads such records by the schemas of a registry
    known                                       the inputs of messages that a model does not know
"""
