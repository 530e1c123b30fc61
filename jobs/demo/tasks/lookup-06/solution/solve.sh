#!/bin/bash
set -e
cd /app
grep size grape.txt
echo olive > island.txt
