#!/bin/bash
set -e
cd /app
mv hazel.txt kettle.txt
