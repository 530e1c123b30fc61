#!/bin/bash
set -e
cd /app
cat robin.txt
echo velvet > brick.txt
