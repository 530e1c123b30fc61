#!/bin/bash
set -e
cd /app
echo thistle > fern.txt
