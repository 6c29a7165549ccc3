"""From an experiment file to runs.

plan       the file, its axes and filters; `fields`: dotted names, `filters`: conditions, `resolve`: a cell of each point
tune       what one field is to be for each arm        order       which run comes when
estimate   how long it will take                       recordings  what replays need first
conduct    all of that together                        controller  makes the runs: certify, train, certify
session    lab and stage hosts of one network          interrupt   what Ctrl-C means
progress   what a person sees; `live` on a terminal
"""
