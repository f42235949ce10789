"""What a process asks the cluster: topics, their settings and identities, its rights, and whether it answers at all.

admin            creates the topics of the catalogue and checks them; `topic_check` compares, without I/O
rights           the least rights of each role, and the check at a start
topic_identity   the ids of topics: a topic that is made again is another log
watch            whether the cluster answers, and topics keep their partitions
admin_process    the child process in which a process that serves makes admin requests
"""
