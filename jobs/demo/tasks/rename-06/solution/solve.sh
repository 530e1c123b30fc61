#!/bin/bash
set -e
cd /app
mv honey.txt walnut.txt
