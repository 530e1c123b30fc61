#!/bin/bash
set -e
cd /app
cat clover.txt
echo thistle > robin.txt
