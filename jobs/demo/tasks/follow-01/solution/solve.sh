#!/bin/bash
set -e
cd /app
cat kettle.txt
mkdir berry
