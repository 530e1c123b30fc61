#!/bin/bash
set -e
cd /app
cat ember.txt
mkdir walnut
